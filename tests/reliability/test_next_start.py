"""What may be different at the next start: DVC was killed, the clock set back, fewer processes.

Seeded and bounded; each ends with the outputs of a run that was left alone, or says in one line
what to do.
"""

import json
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from g2rpo_core.foundation.manifest import describe_files
from tests.conftest import ROOT
from tests.fixtures.commands import run_module
from tests.fixtures.killed_stages import hashes
from tests.fixtures.projects import git
from tests.reliability.conftest import make_checkout
from tests.reliability.test_by_hand import change

pytestmark = [pytest.mark.pipeline, pytest.mark.slow]
EVALUATE, TRAIN = "evaluate@g2rpo-1", "train@g2rpo-1"
FOLDERS = ("models", "prompts", "embeddings", "runs", "evaluations", "reports/metrics")
KILLED = """
import os, runpy, signal, sys
from pathlib import Path
from tests.fixtures.killed_stages import Counter
at, log, *sys.argv = sys.argv[1:]
sys.addaudithook(Counter(Path.cwd(), int(at) or None, Path(log)))
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""


@pytest.fixture
def trained(project) -> Path:
    """The small project as a checkout; DVC knows all but the run and its evaluation."""
    make_checkout(project)
    (project / "params.yaml").write_text(
        "profile: small\nmethods: [g2rpo]\nseeds: [1]\npublished: []\n"
    )
    stages = ("code", "profile", "models", "prompts", "embed", "published", "evaluate_base")
    dvc(project, "commit", "--force", *stages).check_returncode()
    git(project, "add", "--force", "dvc.lock", "dvc.yaml", "params.yaml")
    git(project, "-c", "user.name=a", "-c", "user.email=a@b", "commit", "--quiet", "-m", "start")
    return project


def dvc(project: Path, *words: str) -> subprocess.CompletedProcess[str]:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return run_module("dvc", *words, folder=project, PATH=path)


def killed_at(project: Path, moment: int, *words: str) -> int:
    """DVC, killed at its n-th operation on a file (0: never); return how many there were."""
    log = project.with_name("events")
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(moment), str(log), "dvc", *words],
        cwd=project,
        env={**os.environ, "PYTHONPATH": f"{project}:{ROOT}"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == (-9 if moment else 0), done.stderr[-2000:]
    return json.loads(log.read_text())[0]


def made(project: Path) -> dict[str, str]:
    """What stages made, but for DVC's own notes beside it."""
    found = hashes(project).items()
    return {
        path: content
        for path, content in found
        if path.startswith(FOLDERS) and not path.endswith(".gitignore")
    }


def test_dvc_killed_while_it_takes_a_run_loses_nothing(trained, tmp_path):
    """At any of its file operations: in the cache, in links, in dvc.lock, and in its own files."""
    before, words = made(trained), ("commit", "--force", TRAIN, EVALUATE)
    copy = lambda: Path(
        shutil.copytree(trained, tmp_path / "copy", symlinks=True, dirs_exist_ok=True)
    )
    whole = copy()
    count = killed_at(whole, 0, *words)
    lock = (whole / "dvc.lock").read_bytes()
    assert count > 20
    chance, moments = random.Random(0), []
    for moment in [*chance.sample(range(1, count), 5), count]:
        shutil.rmtree(whole)
        project = copy()
        killed_at(project, moment, *words)
        moments.append(json.loads((tmp_path / "events").read_text()))
        assert made(project) == before, moments
        done = dvc(project, *words)
        if done.returncode:  # a lock file that was cut says so, and git has the one before
            assert "dvc.lock" in done.stderr and "Traceback" not in done.stderr, done.stderr
            git(project, "checkout", "dvc.lock")
            done = dvc(project, *words)
        assert done.returncode == 0, (moments, done.stderr[-2000:])
        assert (project / "dvc.lock").read_bytes() == lock and made(project) == before
        assert "up to date" in dvc(project, "status", TRAIN, EVALUATE).stdout
    print(moments)


@pytest.mark.parametrize("before, after", [(1, 2)])
def test_a_killed_run_goes_on_with_another_number_of_processes(project, before, after):
    """From its checkpoint, not from the start; sums of gradients are rounded otherwise."""
    change(project / "profiles" / "small.yaml", "training", iterations=4, prompts_per_iteration=2)
    shutil.rmtree(project / ".cache")
    whole = describe_files(project / "runs").keys()
    words = (project, "continued", before, after)
    done = run_module("tests.fixtures.killed_stages", *words, OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert -9 in found["killed"] and found["kept"] and not any(found["ended"]), found
    last = int(found["kept"][-1].removesuffix(".tmp").split("-")[1])
    assert 1 < last < 4 and "4/4" in found["said"] and f" {last - 1}/4" not in found["said"], found
    assert describe_files(project / "runs").keys() == whole
