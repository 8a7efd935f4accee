"""`g2rpo share`: a colleague who clones and pulls has nothing to run."""

import json
import os
import shutil
from pathlib import Path

import pytest

from pipeline import share, todo
from stages import profile as stage
from tests.conftest import ROOT
from tests.fixtures.commands import refusal, run_here, run_module
from tests.fixtures.projects import git

pytestmark = pytest.mark.pipeline
# Real stages but for training, which takes minutes
STAGES = {
    "profile": {
        "cmd": "python -m stages.profile --profile ${profile}",
        "params": [{"params.yaml": ["profile", "methods"]}],
        "deps": ["profiles"],
        "outs": [{"reports/profile.yaml": {"cache": False}}],
    },
    "train": {
        "cmd": "mkdir -p runs/${profile} reports/metrics && cp code/train runs/${profile}/weights "
        "&& cp code/train reports/metrics/${profile}.json",
        "deps": ["code"],
        "params": [{"reports/profile.yaml": ["training"]}],
        "outs": ["runs/${profile}"],
        "metrics": [{"reports/metrics/${profile}.json": {"cache": False}}],
    },
}


def dvc(folder: Path, *words: str) -> None:
    done = run_module("dvc", *words, folder=folder, DVC_NO_ANALYTICS="1", PATH=os.environ["PATH"])
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture
def project(tmp_path):
    """A checkout with a remote on disk, whose last commit ran profile `tiny`; now `mine` has."""
    folder = tmp_path / "project"
    shutil.copytree(ROOT / "profiles", folder / "profiles")
    (folder / "code").mkdir()
    (folder / "code" / "train").write_text("1")
    (folder / "dvc.yaml").write_text(json.dumps({"stages": STAGES}))
    (folder / ".gitignore").write_text("/runs\n/reports/others\n")
    git(folder, "init", "--quiet")
    dvc(folder, "init", "--quiet")
    name(folder, "tiny")
    git(folder, "add", "--all")
    git(folder, "commit", "--quiet", "--message", "tiny")
    dvc(folder, "remote", "add", "--default", "disk", str(tmp_path / "remote"))
    (folder / "profiles" / "mine.yaml").write_text("extends: tiny\ntraining: {iterations: 3}\n")
    (folder / "code" / "train").write_text("2")
    (folder / "code" / "helper").write_text("new")
    name(folder, "mine")
    return folder


def name(folder: Path, profile: str) -> None:
    """Name a profile in params.yaml, and run it; its stage `profile` in this process."""
    (folder / "params.yaml").write_text(
        f"profile: {profile}\nmethods: [g2rpo]\nseeds: [1]\npublished: []\n"
    )
    resolve(folder, profile)
    dvc(folder, "repro", "--quiet")


def resolve(folder: Path, profile: str) -> None:
    done = run_here(stage.main, "--profile", profile, folder=folder)
    assert done.returncode == 0, done.stderr
    dvc(folder, "commit", "--force", "--quiet", "profile")


def listed(folder: Path, *words: str) -> list[str]:
    done = run_here(share.main, *words, folder=folder)
    assert done.returncode == 0, done.stderr
    return [line.strip() for line in done.stdout.splitlines() if line.startswith("  ")]


def test_a_colleague_of_exactly_these_files_has_nothing_to_run(project, tmp_path):
    (project / "reports" / "metrics" / "earlier.json").write_text("{}")
    (project / "notes.txt").write_text("mine alone")
    files = listed(project, "--add")
    assert files == [
        ".dvc/config",
        "code/helper",
        "code/train",
        "dvc.lock",
        "params.yaml",
        "profiles/mine.yaml",
        "reports/metrics/mine.json",
        "reports/profile.yaml",
    ]
    assert git(project, "diff", "--cached", "--name-only").split() == files
    git(project, "commit", "--quiet", "--message", "mine")
    assert listed(project) == []
    dvc(project, "push", "--quiet")
    theirs = tmp_path / "theirs"
    git(tmp_path, "clone", "--quiet", str(project), str(theirs))
    dvc(theirs, "pull", "--quiet")
    assert run_here(todo.main, folder=theirs).stdout == (
        "profile mine: nothing to do, all 2 stages are up to date\n"
    )
    assert (theirs / "runs" / "mine" / "weights").read_text() == "2"


def test_a_profile_that_is_not_used_is_named_with_what_leaving_it_out_does(project):
    (project / "profiles" / "later.yaml").write_text("extends: tiny\n")
    assert refusal(share.main, folder=project) == (
        "error: profile mine: profile would run for a colleague as well: dvc repro first; "
        "g2rpo todo says why\n"
    )
    resolve(project, "mine")
    told = run_here(share.main, folder=project).stdout
    assert (
        "profiles/later.yaml: not used by profile mine, but the stage `profile` depends on the "
        "folder"
    ) in told
    assert "profiles/later.yaml" in listed(project)


def test_without_git_or_a_remote_it_says_what_to_do(project):
    dvc(project, "remote", "remove", "disk")
    assert "dvc remote add -d NAME URL, commit .dvc/config, then dvc push" in (
        run_here(share.main, folder=project).stdout
    )
    shutil.rmtree(project / ".git")
    assert "error: g2rpo share: " in refusal(share.main, folder=project)
