"""Reads the arguments and sections of a stage, names its folders, and ends it in one line on an error that the user can fix."""

import functools
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from argparse import ArgumentParser
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import ParamSpec

from tqdm import tqdm

from g2rpo_core.foundation.errors import STATUS_FOLDER, TRANSIENT_STATUS, TransientError, UserError
from g2rpo_core.foundation.files import is_full, read_yaml
from g2rpo_core.foundation.settings import checked_name
from g2rpo_core.foundation.texts import visible

P = ParamSpec("P")
ROOT = Path(__file__).parents[1]  # of the code; data are in the working directory
REPORTS = Path("reports")
BUSY_TRIES, BUSY_WAIT = 120, 5.0  # seconds between two tries of DVC while another of its runs has the same files


def arguments(description: str, *names: str) -> SimpleNamespace:
    """Return the named command-line arguments of a stage, all required except `study`."""
    parser = ArgumentParser(description=description)
    for name in names:
        parser.add_argument(f"--{name}", required=name != "study")
    given = SimpleNamespace(**{"study": None, **vars(parser.parse_args())})
    for name in ("profile", "method", "study"):
        if (value := getattr(given, name, None)) is not None:
            checked_name(value, f"--{name}")
    if (seed := getattr(given, "seed", "0")) and not (seed.isdecimal() and seed.isascii() and int(seed) < 2**64):
        raise UserError(f"--seed {seed!r}: must be a whole number from 0 and less than 2**64")
    return given


@dataclass(frozen=True)
class RunPaths:
    """The folders of runs, evaluations and reports: those of params.yaml, or of a study."""

    name: str
    """The profile's, or `studies/NAME`."""
    runs: Path
    evaluations: Path
    reports: Path
    lock: Path
    """DVC's."""

    @property
    def timings(self) -> Path:
        """Return the folder of seconds, which differ from run to run, so that DVC does not hash them."""
        return self.reports / "timings"


def run_paths(profile: str, study: str | None) -> RunPaths:
    """Return the paths of the profile's own runs, or of a study with it."""
    if study is None:
        return RunPaths(profile, Path("runs", profile), Path("evaluations", profile), REPORTS, Path("dvc.lock"))
    home = Path("studies", study)
    return RunPaths(str(home), home / "runs", home / "evaluations", home / "reports", home / "dvc.lock")


def declared_code(stage: str) -> list[Path]:
    """Return the packages and files of code that a stage declares to DVC; a run can resume while they stay the same."""
    stages = read_yaml(ROOT / "dvc.yaml")["stages"]
    return [ROOT / path for path in stages[stage]["deps"] if path.startswith(("g2rpo_core/", "stages/"))]


def sections(args: SimpleNamespace, *names: str) -> SimpleNamespace:
    """Return the named sections of a profile that was checked as a whole, with the study's changes; a stage sees no others.

    Compute by the profile's numerics from now on. With the section `methods` comes `run`, which resolves one of its entries.
    """
    # Late, so that --help does not wait for torch
    from g2rpo_core.config import load_profile, load_study, profile_path
    from g2rpo_core.numerics.portable import use

    loaded = load_profile(profile_path(args.profile), load_study(args.study) if args.study else None)
    use(loaded.numerics)
    runs = {"run": loaded.run} if "methods" in names else {}
    return SimpleNamespace(**{name: getattr(loaded, name) for name in names}, **runs)


def commit(stage: str, paths: RunPaths) -> bool:
    """Commit to DVC the outputs of a stage that DVC did not start: the next `dvc repro` would delete them and run it again.

    Return whether DVC knows them now, or there is no DVC here.
    """
    project = paths.lock.parent
    if "DVC_STAGE" in os.environ or not (project / ".dvc").exists():
        return True
    if project == Path(".") and (profile := read_yaml(Path("params.yaml")).get("profile")) != paths.name:
        print(f"DVC does not know this run: params.yaml names profile {profile}, not {paths.name}", file=sys.stderr)
        return False
    done = update_profile(project)
    if not done.returncode:
        done = _dvc("commit", "--force", stage, project=project)
    if done.returncode:
        why = done.stderr.strip().split("\n")[-1]
        print(f"DVC does not know this run yet ({why}); before the next dvc repro, run: dvc commit -f {stage}", file=sys.stderr)
        return False
    print(f"dvc status knows this run as {stage}")
    return True


def update_profile(project: Path = Path(".")) -> subprocess.CompletedProcess[str]:
    """Run DVC's stage `profile`, unless it is up to date: stages that run read its output, and would block it."""
    checked = _dvc("status", "--quiet", "profile", project=project)
    return _dvc("repro", "profile", project=project) if checked.returncode else checked


def _dvc(*words: str, project: Path) -> subprocess.CompletedProcess[str]:
    """Run DVC, which waits for its lock; also wait for another of its runs that has the same files, for ten minutes."""
    for _ in range(BUSY_TRIES):
        command = [sys.executable, "-m", "dvc", "--wait-for-lock", *words]
        done = subprocess.run(command, cwd=project, capture_output=True, text=True)
        if "is busy, it is being blocked by" not in done.stderr:
            break
        time.sleep(BUSY_WAIT)
    return done


def ends_in_one_line(main: Callable[P, None]) -> Callable[P, None]:
    """Turn a UserError into one line and exit status 1, or 75 if the same command may work later."""

    @functools.wraps(main)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        if threading.current_thread() is threading.main_thread():
            # From here on Ctrl-C is handled below, see stages/__init__.py
            signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            main(*args, **kwargs)
        except UserError as error:
            say(f"error: {error}")
            status = TRANSIENT_STATUS if isinstance(error, TransientError) else 1
            if STATUS_FOLDER in os.environ:
                left = Path(os.environ[STATUS_FOLDER], str(status))
                left.parent.mkdir(parents=True, exist_ok=True)
                left.touch()
            sys.exit(status)
        except Exception as error:
            if not is_full(error):
                raise
            where = getattr(error, "filename", None) or Path.cwd()
            say(
                f"error: {visible(where)}: the disk is full; finished work is kept: make room, and the same command resumes from it"
            )
            sys.exit(1)
        except KeyboardInterrupt:  # Ctrl-C, when no checkpoint has to be written first
            say("error: stopped; finished work is kept, and the same command resumes from it")
            sys.exit(128 + signal.SIGINT)

    return run


def say(line: str) -> None:
    """Print one line on stderr, below the progress bars, which it closes."""
    # tqdm has no public list of its bars
    for bar in list(getattr(tqdm, "_instances", ())):
        bar.close()
    print(line, file=sys.stderr)


def fresh(folder: Path) -> Path:
    """Empty a folder of what an earlier run by hand left, as DVC removes outputs before a run; return it."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


def write_json(path: Path, data: object) -> None:
    """Write indented JSON, after making the file's folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(data, indent=1) + "\n")
