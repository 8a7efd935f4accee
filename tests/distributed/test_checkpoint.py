"""Exact resume: real processes, killed by real signals at seeded moments, end with the same bits."""

import json
import os
import random
import subprocess
import sys

import pytest
import torch

from g2rpo_core.distributed import checkpoint
from g2rpo_core.distributed.process_group import ProcessGroup
from g2rpo_core.errors import UserError
from tests.conftest import ROOT


@pytest.mark.slow
@pytest.mark.parametrize("processes, kills", [(1, 9), (2, 9)])
def test_a_run_killed_at_any_moment_ends_as_an_uninterrupted_one(processes, kills, models, embeddings_folder, tmp_path):
    (tmp_path / "models").symlink_to(models)
    (tmp_path / "embeddings").symlink_to(embeddings_folder)
    rng = random.Random(processes)
    moments = [f"{rng.uniform(0.05, 0.6) * processes:.2f}" for _ in range(kills)]
    done = subprocess.run(
        [sys.executable, "-m", "tests.fixtures.killed", tmp_path, str(processes), moments[0], "write", *moments[1:], "term"],
        cwd=ROOT, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    uninterrupted, *killed, terminated, resumed = json.loads(done.stdout.splitlines()[-1])
    assert all(-9 in attempt["ended"] for attempt in killed) and uninterrupted["ended"] == resumed["ended"] == [0]
    assert any(name.endswith(".tmp") for name in killed[1]["left"])  # the second was killed inside the write of a checkpoint
    assert terminated["ended"] == [143] and not any(name.endswith(".tmp") for name in terminated["left"])
    assert resumed["left"] == ["iteration-000007", "iteration-000008"]  # checkpoints.keep is 2
    for rank in range(processes):
        ends = [torch.load(tmp_path / f"end-{name}-{rank}.pt", weights_only=True) for name in ("uninterrupted", "resumed")]
        for end in ends:
            for record in end["records"]:
                del record["seconds"]
        assert same(*ends)


def same(a, b) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


@pytest.mark.parametrize("harm", ["truncated", "missing", "manifest"])
def test_a_damaged_checkpoint_is_refused_in_words(tmp_path, harm):
    path = checkpoint.save(tmp_path, 3, {"weights": [torch.zeros(9)]}, keep=1)
    part = path / (checkpoint.MANIFEST if harm == "manifest" else "rank-0.pt")
    part.unlink() if harm == "missing" else part.write_bytes(part.read_bytes()[:-1])
    with pytest.raises(UserError, match="iteration-000003 is damaged .*: delete .*iteration-000003 to go on from the one before"):
        checkpoint.load(path)


def test_a_checkpoint_of_another_process_group_is_refused_in_words(tmp_path):
    path = checkpoint.save(tmp_path, 1, {}, keep=1)
    with pytest.raises(UserError, match="was written by 1 processes, this run has 2"):
        checkpoint.load(path, ProcessGroup(0, 2))


def test_retention_keeps_the_newest(tmp_path):
    for iteration in range(1, 6):
        checkpoint.save(tmp_path, iteration, {"iteration": iteration}, keep=2)
    assert [checkpoint.load(path) for path in checkpoint.checkpoints(tmp_path)] == [{"iteration": 4}, {"iteration": 5}]


def test_another_setting_input_or_process_group_never_continues(tmp_path, tiny, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "models.lock.json"
    file.write_text("1")
    folder = lambda training: checkpoint.scratch("train", "tiny/g2rpo-1", {"training": training}, [file])
    first = folder(tiny.training)
    assert folder(tiny.training) == first and not capsys.readouterr().err
    kept = tiny.training.model_copy(update={"checkpoints": tiny.training.checkpoints.model_copy(update={"every": 7})})
    assert folder(kept) == first  # how often is written down decides nothing
    other = folder(tiny.training.model_copy(update={"learning_rate": 1.0}))
    assert other != first
    assert "is not continued: other training.learning_rate; it can be deleted" in capsys.readouterr().err
    file.write_text("2")
    assert folder(tiny.training) not in (first, other)
    assert f"content of {file}" in capsys.readouterr().err
    file.write_text("1")
    monkeypatch.setattr(ProcessGroup, "gather", lambda self, value: [value] * self.size)
    assert checkpoint.scratch("train", "tiny/g2rpo-1", {"training": tiny.training}, [file], ProcessGroup(0, 2)) != first
    assert "is not continued: other processes; it can be deleted" in capsys.readouterr().err


@pytest.fixture
def code(tmp_path):
    """A folder of code that a stage depends on, beside a file that it does not depend on."""
    folder = tmp_path / "code"
    (folder / "deep").mkdir(parents=True)
    (folder / "deep" / "step.py").write_text("step = 1")
    (tmp_path / "report.py").write_text("report = 1")
    return folder


def test_an_edit_of_what_is_no_dependency_keeps_the_scratch_folder(code, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    first = checkpoint.scratch("train", "run", {}, [code])
    (tmp_path / "report.py").write_text("report = 2")
    (code / "deep" / "__pycache__").mkdir()
    (code / "deep" / "__pycache__" / "step.pyc").write_text("compiled")
    assert checkpoint.scratch("train", "run", {}, [code]) == first and not capsys.readouterr().err


@pytest.mark.parametrize("edit", ["changed", "added", "removed"])
def test_an_edit_in_a_folder_that_a_stage_depends_on_does_not_keep_it(code, tmp_path, monkeypatch, capsys, edit):
    monkeypatch.chdir(tmp_path)
    (code / "other.py").write_text("other = 1")
    first = checkpoint.scratch("train", "run", {}, [code])
    edited = code / ("new.py" if edit == "added" else "other.py")
    edited.unlink() if edit == "removed" else edited.write_text("other = 2")
    assert checkpoint.scratch("train", "run", {}, [code]) != first
    assert f"{first} is not continued: other content of {edited}; it can be deleted" in capsys.readouterr().err
