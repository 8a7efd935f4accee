"""`make clean` in a small DVC project of its own."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT

pytestmark = pytest.mark.pipeline
COMMAND = ["make", "--no-print-directory", f"PYTHON={sys.executable}", "clean"]


@pytest.fixture
def project(tmp_path) -> Path:
    """A project with one run that DVC's cache has, one that has changed since, and a model."""
    for name in ("__init__.py", "clean.py", "environment.py"):
        (tmp_path / "tools").mkdir(exist_ok=True)
        shutil.copy(ROOT / "tools" / name, tmp_path / "tools")
    shutil.copy(ROOT / "Makefile", tmp_path)
    outs = [
        "runs/tiny/kept-1",
        "runs/tiny/changed-1",
        "studies/one/runs/kept-2",
        "studies/one/base-2/runs/kept-3",
    ]
    for path in (*outs, "runs/tiny/kept-1/lora/a", "models/tiny", "studies/one/base-2/models"):
        (tmp_path / path).mkdir(parents=True)
        (tmp_path / path / "weights").write_text(path)
        (tmp_path / path / "a-b").write_text("the same")
    (tmp_path / "dvc.yaml").write_text(
        json.dumps({"stages": {"train": {"cmd": "true", "outs": outs}}})
    )
    (tmp_path / ".gitignore").write_text("runs\n")
    for command in (
        ["git", "init", "--quiet"],
        ["dvc", "init", "--quiet"],
        ["dvc", "commit", "--quiet", "--force"],
    ):
        subprocess.run(
            [sys.executable, "-m", *command] if command[0] == "dvc" else command,
            cwd=tmp_path,
            check=True,
        )
    return tmp_path


def clean(project: Path, **variables: str) -> tuple[int, list[str]]:
    done = subprocess.run(
        COMMAND,
        cwd=project,
        env={**os.environ, **variables},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    return done.returncode, [
        line for line in done.stderr.splitlines() if not line.startswith("make: ")
    ]


MADE = ["runs", "models", "studies/one/runs", "studies/one/base-2", ".cache/resume"]


def left(project: Path) -> list[str]:
    return [name for name in MADE if (project / name).exists()]


def test_runs_that_the_cache_has_are_removed_without_a_question(project):
    """The lock of a run that has ended is nothing to lose."""
    (project / ".cache" / "resume" / "train" / "tiny").mkdir(parents=True)
    (project / ".cache" / "resume" / "train" / "tiny" / "kept-1.lock").write_text("123")
    assert clean(project) == (0, []) and left(project) == []


def test_runs_in_no_cache_are_named_and_nothing_is_removed(project):
    file = project / "runs" / "tiny" / "changed-1" / "weights"
    file.unlink()
    file.write_text("trained on")
    name = hashlib.md5(b"studies/one/base-2/runs/kept-3").hexdigest()
    cached = project / ".dvc" / "cache" / "files" / "md5" / name[:2] / name[2:]
    cached.chmod(0o644)
    cached.write_text("3-tpek")
    state = project / ".cache" / "resume" / "train" / "state"
    state.mkdir(parents=True)
    (state / "weights").write_text("half way")
    status, error = clean(project)
    names = ".cache/resume/train/state, runs/tiny/changed-1, studies/one/base-2/runs/kept-3"
    assert status == 2 and error[0].startswith(f"error: runs in no cache: {names}; nothing was")
    assert left(project) == MADE
    assert clean(project, CONFIRM="1") == (0, []) and left(project) == []
