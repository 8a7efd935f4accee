"""Going back to the committed results: both states can be had again, and nothing is touched where they could not."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.flows.tiny import environment

pytestmark = pytest.mark.pipeline
STAGES = """
stages:
  train:
    cmd: mkdir -p runs && cp params.yaml runs/weights && cp params.yaml score.json
    params: [rate]
    outs: [runs]
    metrics: [{score.json: {cache: false}}]
"""


def run(folder: Path, *words: str) -> subprocess.CompletedProcess:
    words = words if words[0] == "git" else (sys.executable, "-m", *words)
    here = environment(PATH=f"{Path(sys.executable).parent}:/usr/bin:/bin")
    return subprocess.run(words, cwd=folder, env=here, capture_output=True, text=True)


def state(folder: Path) -> dict[str, str]:
    return {
        name: (folder / name).read_text()
        for name in ("params.yaml", "dvc.lock", "runs/weights", "score.json")
    }


@pytest.fixture
def project(tmp_path) -> Path:
    """A project whose committed results have rate 1, and whose own have rate 2."""
    (tmp_path / "dvc.yaml").write_text(STAGES)
    (tmp_path / "params.yaml").write_text("{rate: 1}")
    for words in (
        ("git", "init", "--quiet"),
        ("git", "config", "user.email", "a@b.c"),
        ("git", "config", "user.name", "A"),
        ("dvc", "init", "--quiet"),
        ("dvc", "repro", "--quiet"),
        ("git", "add", "-A"),
        ("git", "commit", "--quiet", "-m", "rate 1"),
    ):
        done = run(tmp_path, *words)
        assert done.returncode == 0, done.stderr
    (tmp_path / "params.yaml").write_text("{rate: 2}")
    assert run(tmp_path, "dvc", "repro", "--quiet").returncode == 0
    return tmp_path


def test_both_results_can_be_had_again(project):
    own = state(project)
    done = run(project, "pipeline.back")
    assert done.returncode == 0 and "git stash pop && dvc checkout" in done.stdout, done.stderr
    assert {state(project)[name] for name in ("params.yaml", "runs/weights", "score.json")} == {
        "{rate: 1}"
    }
    assert (
        run(project, "git", "stash", "pop").returncode == 0
        and run(project, "dvc", "checkout").returncode == 0
    )
    assert state(project) == own


def test_committed_results_of_another_machine_are_missed_before_anything_is_lost(project):
    own = state(project)
    lock = run(project, "git", "show", "HEAD:dvc.lock").stdout
    md5 = next(line.split(": ")[1] for line in lock.splitlines() if line.endswith(".dir"))
    (project / ".dvc" / "cache" / "files" / "md5" / md5[:2] / md5[2:]).unlink()
    done = run(project, "pipeline.back")
    assert done.returncode == 1 and done.stderr.startswith(
        "error: the cache has no runs as committed (another machine made them)"
    )
    assert state(project) == own


def test_what_dvc_has_not_stored_is_not_overwritten(project):
    (project / "runs" / "weights").write_text("by hand")
    own = state(project)
    done = run(project, "pipeline.back")
    assert (
        done.returncode == 1
        and "is not in DVC's cache as it is now" in done.stderr
        and "dvc commit" in done.stderr
    )
    assert state(project) == own


def test_without_a_commit_it_ends_in_one_line(project):
    shutil.rmtree(project / ".git")
    done = run(project, "pipeline.back")
    assert done.returncode == 1 and len(done.stderr.strip().splitlines()) == 1, done.stderr
    assert (project / "runs" / "weights").read_text() == "{rate: 2}" and ROOT != project
