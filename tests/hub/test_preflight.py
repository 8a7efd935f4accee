"""`g2rpo doctor --profile P` with a hub that lacks most, real processes and no GPU."""

import re

import pytest
import torch

from g2rpo_core.cli.main import main
from g2rpo_core.config import load_profile
from tests.conftest import ROOT
from tests.fixtures.commands import run_here

pytestmark = pytest.mark.pipeline


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what a machine without a GPU lacks")
def test_the_preflight_says_what_is_red_and_what_to_do(hub, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    (tmp_path / "profiles").symlink_to(ROOT / "profiles")
    models = load_profile(ROOT / "profiles" / "flux_lora_1gpu.yaml").models.repos
    for name, licensed in (("pipeline", "token"), ("hps", None)):
        folder = tmp_path / name
        folder.mkdir()
        for file in ("model_index.json", "HPS_v2.1_compressed.pt"):
            (folder / file).write_text("{}")
        hub.add(models[name].repo, models[name].revision, folder, licensed)
    done = run_here(main, "doctor", "--profile", "flux_lora_1gpu", folder=tmp_path)
    lines = [line for line in done.stdout.splitlines() if line.startswith(("ok ", "RED "))]
    about = lambda word: next(line for line in lines if word in line)
    assert about("GPUs: torch").startswith("RED") and "go to a node with GPUs" in about(
        "GPUs: torch"
    )
    assert re.match(r"ok +all-reduce: gloo, 2 processes: [0-9.]+ GB/s$", about("all-reduce"))
    assert "is gated: accept its licence" in about(
        "black-forest-labs/FLUX.1-dev"
    ) and "hf auth login" in about("FLUX.1-dev")
    assert about("xswu/HPSv2").startswith("ok") and "does not exist" in about("PickScore_v1")
    assert (
        "models, in HF_HOME" in about("disk of")
        and about("locks:").startswith("ok")
        and about("address:")
    )
    red = sum(line.startswith("RED") for line in lines)
    assert (
        done.returncode == 1
        and done.stderr == f"error: doctor: {red} checks of profile flux_lora_1gpu are red\n"
    )
