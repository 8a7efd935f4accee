"""What `make verify` says: which outputs differ, and by how much."""

import json
import re
import shutil
from contextlib import chdir
from pathlib import Path

import pandas as pd
import pytest
import torch
from dvc.repo import Repo
from safetensors.torch import save_file

from g2rpo_core.foundation.runs import hash_of
from pipeline import verify
from tests.fixtures.commands import refusal, run_here
from tests.fixtures.projects import git, init

# Each stage copies what it "makes" from made/, of which DVC knows nothing: as from another machine,
# its outputs differ with no edit
PIPELINE = """\
stages:
  models:
    cmd: cp -r made/models models
    outs: [models]
  evaluate:
    cmd: mkdir -p reports && cp -r made/evaluations evaluations && cp made/metrics.json reports/
    deps: [models]
    outs: [evaluations, reports/metrics.json: {cache: false}]
  report:
    cmd: cp made/report.md reports/
    deps: [evaluations]
    outs: [reports/report.md: {cache: false}]
"""


def make(folder: Path, shift: float) -> None:
    """Write what a machine computes, off by `shift`."""
    made = folder / "made"
    shutil.rmtree(made, ignore_errors=True)
    for name in ("models/hps", "models/pipeline", "evaluations/pictures"):
        (made / name).mkdir(parents=True)
    weights = {"weight": torch.full((4,), 1 + shift)}
    save_file(weights, made / "models" / "pipeline" / "model.safetensors")
    torch.save(weights, made / "models" / "hps" / "hps.pt")
    (made / "models" / "config.json").write_text('{"layers": 2}')
    for number in range(9):
        (made / "evaluations" / "pictures" / f"{number}.png").write_text(f"a picture {shift}")
    scores = pd.DataFrame({"reward": "hps", "score": [0.1, 0.3 + shift]})
    scores.to_parquet(made / "evaluations" / "results.parquet")
    (made / "metrics.json").write_text(json.dumps({"hps": 0.2 + shift}))
    (made / "report.md").write_text("G2RPO gains")
    with chdir(folder), Repo() as repo:
        repo.reproduce(force=True)


@pytest.fixture(scope="module")
def made_once(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("made") / "project"
    folder.mkdir()
    (folder / "dvc.yaml").write_text(PIPELINE)
    (folder / ".gitignore").write_text("/made\n/models\n/evaluations\n")
    init(folder)
    make(folder, 0.0)
    git(folder, "add", "--all")
    git(folder, "commit", "--quiet", "--message", "committed")
    return folder


@pytest.fixture
def project(made_once, tmp_path) -> Path:
    """A checkout with all outputs of a pipeline whose lock is committed."""
    return shutil.copytree(made_once, tmp_path / "project")


def remove(path: Path) -> None:
    """What is linked into DVC's cache is never written over."""
    shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


def verified(folder: Path) -> tuple[int, list[str]]:
    done = run_here(verify.main, folder=folder)
    assert done.stderr == ""
    return done.returncode, done.stdout.splitlines()


def test_outputs_that_differ_are_status_1_and_told_how_far(project):
    """Of other files than tables, weights and JSON their sizes."""
    said = "4 equal, 0 different, 0 missing: every output is the committed one"
    assert verified(project) == (0, [said])
    make(project, 0.5)
    remove(project / "models" / "config.json")
    remove(project / "reports" / "report.md")
    (project / "models" / "notes.txt").write_text("mine")
    status, lines = verified(project)
    shown = [re.sub(r"\d+ -> \d+ bytes", "bytes", line) for line in lines]
    assert status == 1 and shown == [
        "different  models",
        "           config.json: missing here",
        "           hps/hps.pt: bytes",
        "           notes.txt: only here",
        "           pipeline/model.safetensors: differs by 0.5 at most, in weight",
        "different  evaluations",
        *(f"           pictures/{number}.png: bytes" for number in range(8)),
        "           and 2 others",
        "different  reports/metrics.json",
        "           differs by 0.5 at most, in hps",
        "missing    reports/report.md",
        "0 equal, 3 different, 1 missing; compare the results by: g2rpo report --compare HEAD now",
    ]


def test_without_dvcs_cache_only_what_git_holds_is_measured(project):
    shutil.rmtree(project / ".dvc" / "cache")
    for name in ("models/config.json", "reports/metrics.json"):
        remove(project / name)
        (project / name).write_text('{"hps": 3}')
    assert verified(project)[1][:-1] == [
        "different  models",
        "           of the committed one only its hash is known here",
        "different  reports/metrics.json",
        "           differs by 2.8 at most, in hps",
    ]


def test_outside_of_a_git_checkout_one_line_says_so(tmp_path):
    assert "no committed dvc.lock to compare with" in refusal(verify.main, folder=tmp_path)


def test_what_a_damaged_cache_gave_back_is_different(project):
    """DVC looks at no byte of a cached file that is read-only, nor at what it restored from it."""
    file = project / "models" / "config.json"
    md5 = hash_of(file)
    cached = project / ".dvc" / "cache" / "files" / "md5" / md5[:2] / md5[2:]
    cached.chmod(0o644)
    cached.write_text('{"layers": 3}')
    cached.chmod(0o444)
    remove(project / "models")
    with chdir(project), Repo() as repo:
        repo.checkout()
        assert not repo.status() and "3" in file.read_text()
    assert verified(project)[1][:-1] == [
        "different  models",
        "           config.json: of the committed one only its hash is known here",
    ]
