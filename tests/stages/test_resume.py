import json
import os
import subprocess
import sys

import pandas as pd
import pytest
import torch
from ruamel.yaml import YAML

from g2rpo_core.checkpoint import Checkpoints, identity

from ..conftest import ROOT


@pytest.fixture
def project(models, embeddings_folder, tmp_path):
    """A folder with profile `small`, whose models and embeddings are those of the session."""
    yaml = YAML()
    profile = yaml.load(ROOT / "profiles" / "tiny.yaml")
    profile["training"] |= {
        "iterations": 14, "group_size": 2, "monitor": {"every": 4, "prompts": 3, "rewards": ["verifier"]}, "checkpoint": {"every": 2, "keep": 2},
    }  # fmt: skip
    (tmp_path / "profiles").mkdir()
    yaml.dump(profile, tmp_path / "profiles" / "small.yaml")
    for name, source in (("models", models), ("embeddings", embeddings_folder)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "small").symlink_to(source)
    return tmp_path


def python(project, *words):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, "-m", *words], cwd=project, capture_output=True, text=True, env=environment)


@pytest.mark.parametrize("seed", [1])
def test_a_killed_run_ends_as_an_uninterrupted_one(project, seed):
    done = python(project, "tests.stages.killing", str(seed))
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.strip().split("\n")[-1])
    assert told["kills"] >= 10 and told["in_write"] == 1 and not told["left"]
    assert told["term"] in (0, 143)
    assert set(told["rounds"]) <= {0}
    whole = project / "whole"
    resumed = sorted(project.glob("resumed-*"))
    assert resumed
    for run in resumed:
        for file in ("transformer/diffusion_pytorch_model.safetensors", "transformer/config.json"):
            assert (run / file).read_bytes() == (whole / file).read_bytes()
        ours, theirs = (pd.read_parquet(folder / "records.parquet").drop(columns="seconds") for folder in (run, whole))
        pd.testing.assert_frame_equal(ours, theirs, check_exact=True)


def test_a_checkpoint_of_other_settings_or_a_truncated_one_is_refused_in_words(tmp_path, capsys):
    state = {"weights": torch.ones(1000), "records": [{"iteration": 3, "loss": 0.5}]}
    made_of = identity({"training": {"learning_rate": 1e-5}}, {})
    Checkpoints(tmp_path, made_of).save(3, state)
    again = Checkpoints(tmp_path, made_of).load()
    assert torch.equal(again["weights"], state["weights"]) and again["records"] == state["records"]
    other = Checkpoints(tmp_path, identity({"training": {"learning_rate": 2e-5}}, {}))
    assert other.load() is None
    assert "000003.pt was made with another setting training: it is not continued" in capsys.readouterr().err
    file = tmp_path / "000003.pt"
    file.write_bytes(file.read_bytes()[:-200])
    assert Checkpoints(tmp_path, made_of).load() is None
    assert "cannot be read and is not continued" in capsys.readouterr().err


def test_changed_code_or_input_is_another_run(tmp_path):
    (tmp_path / "input").mkdir()
    (tmp_path / "input" / "part").write_text("one")
    before = identity({}, {"prompts": tmp_path / "input"})
    assert "code trainer.py" in before and "code rewards/open_clip.py" in before
    (tmp_path / "input" / "part").write_text("two")
    after = identity({}, {"prompts": tmp_path / "input"})
    assert {key for key in before if before[key] != after[key]} == {"input prompts"}


def test_only_the_newest_checkpoints_stay(tmp_path):
    checkpoints = Checkpoints(tmp_path, {}, keep=2)
    for number in (2, 4, 6):
        checkpoints.save(number, {"number": number})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["000004.pt", "000006.pt"]
    assert checkpoints.load() == {"number": 6}
    (tmp_path / "000006.pt").write_bytes(b"")
    assert checkpoints.load() == {"number": 4}
