import shutil

import torch

from g2rpo_core.distributed.process_group import ProcessGroup
from stages import train
from tests.conftest import ROOT
from tests.fixtures.commands import refusal


def test_prompts_that_cannot_be_shared_end_a_run_before_it_loads(tmp_path, monkeypatch):
    """With `processes: auto` only the start tells how many there are."""
    shutil.copytree(ROOT / "profiles", tmp_path / "profiles")
    (tmp_path / "params.yaml").write_text("profile: tiny\nmethods: [g2rpo]\nseeds: [1]\n")
    three = lambda *_: (ProcessGroup(1, 3), torch.device("cpu"))
    monkeypatch.setattr(train, "join_processes", three)
    words = ("--profile", "tiny", "--method", "g2rpo", "--seed", 1)
    told = refusal(train.main, *words, folder=tmp_path)
    assert "prompts_per_iteration: 1 cannot be shared evenly by 3 processes: change one" in told
