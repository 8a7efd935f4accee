"""Tells DVC of a stage that it did not start."""

import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

from g2rpo_core.foundation.errors import attempt
from g2rpo_core.foundation.texts import echo, reason
from stages.paths import RunPaths
from stages.versions import is_begun_with

if TYPE_CHECKING:  # DVC is an extra
    from dvc.stage import Stage

BUSY_TRIES = 120
BUSY_WAIT = 5.0  # seconds between two tries of DVC while another of its runs has the same files


def commit(
    stage: str, args: SimpleNamespace, paths: RunPaths, unchanged: Callable[[], bool]
) -> bool:
    """Commit the outputs of a stage that DVC did not start, or `dvc repro` would run it again.

    Only if DVC's own command of that stage is this one, and `unchanged`: settings and dependencies
    are those that it began with. Return whether DVC knows them now, or there is no DVC here; False
    of a stage that DVC started, as it looks at them later.
    """
    project = paths.lock.parent
    if "DVC_STAGE" in os.environ or not (project / ".dvc").exists():
        return "DVC_STAGE" not in os.environ
    if options_of(stage, project) != {
        name: value for name, value in vars(args).items() if value is not None
    }:
        echo(
            f"DVC does not know this run: {project / 'params.yaml'} does not name its profile, "
            "method and seed",
            file=sys.stderr,
        )
        return False
    if not (attempt(unchanged)[0] and is_begun_with(stage)):  # or no longer readable
        echo(
            "DVC does not know this run: its settings, code or inputs have changed since it began",
            file=sys.stderr,
        )
        return False
    # Stages that run read the profile, and block it if it is not up to date
    done = run_dvc("repro", "profile", project=project)
    # It depends on what it starts from, or on nothing
    if not done.returncode and stage.startswith("train@") and project == Path("."):
        done = run_dvc("repro", "--single-item", "published", project=project)
    if not done.returncode:
        done = run_dvc("commit", "--force", stage, project=project)
    if done.returncode:
        echo(
            f"DVC does not know this run yet ({reason(done.stderr)}); before the next dvc repro, "
            f"run: {commit_command(stage, project)}",
            file=sys.stderr,
        )
        return False
    echo(f"dvc status knows this run as {stage}")
    return True


def options_of(stage: str, project: Path) -> dict[str, str]:
    """Return the options of DVC's command for a stage (`train@g2rpo-1`); empty if there is none."""
    try:
        from dvc.exceptions import DvcException
    except ImportError:
        return {}
    try:
        words = shlex.split(str(load_stage(stage, project).cmd))
    except (DvcException, OSError):
        return {}
    return {
        word.removeprefix("--"): value
        for word, value in zip(words, words[1:])
        if word.startswith("--")
    }


def load_stage(stage: str, project: Path) -> "Stage":
    """Load a stage (`train@g2rpo-1`) of the DVC project in a folder, while no other DVC writes.

    Given a name alone, DVC reads the dvc.yaml of the working folder.
    """
    from dvc.repo import Repo, lock_repo

    repo = Repo(str(project), _wait_for_lock=True)
    with lock_repo(repo):  # another run's DVC empties dvc.lock before it writes it
        return repo.stage.load_one(path=str(project / "dvc.yaml"), name=stage)


def commit_command(stage: str, project: Path) -> str:
    """Return what to type in the main project's folder, so that DVC keeps a stage's outputs."""
    return f"{'' if project == Path('.') else f'cd {project} && '}dvc commit -f {stage}"


def run_dvc(*words: str, project: Path = Path(".")) -> subprocess.CompletedProcess[str]:
    """Run DVC, which waits for its lock; wait ten minutes for its other runs on the same files."""
    for _ in range(BUSY_TRIES):
        command = [sys.executable, "-m", "dvc", "--wait-for-lock", *words]
        done = subprocess.run(command, cwd=project, capture_output=True, text=True)
        if "is busy, it is being blocked by" not in done.stderr:
            break
        time.sleep(BUSY_WAIT)
    return done
