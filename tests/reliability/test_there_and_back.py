"""Where a killed training resumes is said before, and a run that only a disk has is kept."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from g2rpo_core.foundation.runs import SCRATCH, hash_of
from pipeline.cached import check_kept
from pipeline.graph import read_graph
from pipeline.runner import run_logged
from tests.fixtures.commands import run_module
from tests.fixtures.errors import refused
from tests.fixtures.killed_stages import hashes
from tests.fixtures.projects import todo
from tests.fixtures.waiting import until
from tests.reliability.conftest import change, make_checkout, stage

pytestmark = pytest.mark.pipeline
TRAIN = "train@g2rpo-1"
PATH = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"


@pytest.fixture
def known(project) -> Path:
    """A checkout all of whose outputs DVC knows, with profile `mini` beside it."""
    make_checkout(project)
    (project / "profiles" / "mini.yaml").write_text(
        "extends: small\ntraining: {iterations: 1, monitor: {every: 1}}\n"
    )
    shutil.copytree(project / "models" / "small", project / "models" / "mini")
    for profile in ("mini", "small"):
        name_profile(project, profile)
        dvc(project, "repro", "--quiet", "profile")
        dvc(project, "commit", "--force", "models")  # minutes to build
    return project


def name_profile(project: Path, profile: str) -> None:
    (project / "params.yaml").write_text(
        f"profile: {profile}\nmethods: [g2rpo]\nseeds: [1]\npublished: []\n"
    )


def dvc(project: Path, *words: str) -> str:
    done = run_module("dvc", *words, folder=project, PATH=PATH)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.mark.slow
def test_a_killed_dvc_repro_goes_on_to_the_same_bits_and_todo_says_from_where(known, monkeypatch):
    """SIGKILL to DVC and all that it started, while training."""
    monkeypatch.chdir(known)
    name_profile(known, "small")
    profile = known / "profiles" / "small.yaml"
    # A constant rate, so that a longer run goes on from a shorter one
    change(profile, "training", iterations=30, lr_scheduler="constant")
    text = profile.read_text()
    dvc(known, "repro", "--quiet", "embed", "published")
    words = [sys.executable, "-m", "dvc", "repro", TRAIN]
    environment = os.environ | {"PATH": PATH, "PYTHONPATH": str(known)}
    home = SCRATCH / "train" / "small" / "g2rpo-1"
    with subprocess.Popen(words, env=environment, start_new_session=True) as child:
        until(lambda: list(home.glob("*/iteration-000003")), running=[child])
        os.killpg(child.pid, signal.SIGKILL)
    written = max(home.glob("*/iteration-" + "[0-9]" * 6), key=lambda path: path.name)
    last = int(written.name[-6:])
    so_far = [record["seconds"] for record in json.loads((written / "records.json").read_text())]
    assert 3 <= last < 30 and not Path("runs/small/g2rpo-1").exists()
    line = todo(known)[TRAIN]
    assert f"resumes after iteration {last} of 30" in line and "never run" not in line
    # A setting that changes the run: it would begin
    profile.write_text(text.replace("num_generations: 2", "num_generations: 3"))
    assert "resumes" not in todo(known)[TRAIN]
    profile.write_text(text)
    # Less is left than was done: it would begin, too
    change(profile, "training", iterations=last - 1)
    assert "resumes" not in todo(known)[TRAIN]
    profile.write_text(text)
    dvc(known, "repro", TRAIN)
    timings = json.loads(Path("reports/timings/g2rpo-1.json").read_text())
    seconds = list(timings["seconds"].values())
    assert len(so_far) > last  # with iteration 0; these were not made again:
    assert seconds[: len(so_far)] == [round(value, 3) for value in so_far]
    resumed = hashes(Path("runs/small/g2rpo-1"))
    dvc(known, "repro", "--force", "--single-item", TRAIN)
    assert hashes(Path("runs/small/g2rpo-1")) == resumed and resumed


def test_a_finished_run_that_nothing_else_has_is_not_removed(known, monkeypatch):
    """It was trained by hand; DVC alone would remove it, and train it again."""
    monkeypatch.chdir(known)
    name_profile(known, "mini")
    assert "DVC does not know this run" in stage("train", known).stderr
    name_profile(known, "small")
    run, before = Path("runs/small/g2rpo-1"), hashes(known / "runs")
    assert f"would remove {run}, which DVC's cache does not have" in todo(known)[TRAIN]
    check_kept(Path("."), TRAIN)  # the scratch folder has it
    shutil.rmtree(SCRATCH)
    for refuses in (
        lambda: check_kept(Path("."), TRAIN),
        lambda: run_logged(read_graph()[TRAIN], Path("."), threading.Event()),
    ):
        with refused(f"{run}: DVC would remove this finished run.*dvc commit -f {TRAIN}"):
            refuses()
    assert hashes(known / "runs") == before
    # Kept as it says
    dvc(known, "commit", "--force", TRAIN)
    check_kept(Path("."), TRAIN)
    # The cached copy counts by its bytes
    md5 = hash_of(run / "records.parquet")
    cached = known / ".dvc" / "cache" / "files" / "md5" / md5[:2] / md5[2:]
    cached.chmod(0o644)
    cached.write_bytes(cached.read_bytes()[::-1])
    cached.chmod(0o444)
    damaged = rf"whose copy in DVC's cache is damaged \(delete {cached}\)"
    with refused(f"would remove this finished run, {damaged}: keep it by .*dvc commit -f"):
        check_kept(Path("."), TRAIN)
    cached.unlink()
    dvc(known, "commit", "--force", TRAIN)
    check_kept(Path("."), TRAIN)
