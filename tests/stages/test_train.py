import shutil
from functools import partial

import torch

from g2rpo_core.distributed.process_group import ProcessGroup
from g2rpo_core.distributed.runtime import Runtime
from stages import train
from tests.conftest import ROOT
from tests.fixtures.commands import refusal


def test_prompts_that_the_started_processes_cannot_share_end_a_run_before_it_loads(tmp_path):
    """With `processes: auto` only the start tells how many there are."""
    shutil.copytree(ROOT / "profiles", tmp_path / "profiles")
    (tmp_path / "params.yaml").write_text("profile: tiny\nmethods: [g2rpo]\nseeds: [1]\n")
    three = Runtime()
    three.join = lambda asked, *how: (ProcessGroup(1, 3), torch.device("cpu"))
    words = ("--profile", "tiny", "--method", "g2rpo", "--seed", 1)
    told = refusal(partial(train.main, three), *words, folder=tmp_path)
    assert "prompts_per_iteration: 1 cannot be shared evenly by 3 processes: change one" in told
