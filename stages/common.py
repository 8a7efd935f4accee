"""Reads the arguments and sections of a stage, names its folders, and ends it in one line on an error that the user can fix."""

import functools
import os
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from argparse import ArgumentParser
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, ParamSpec

from tqdm import tqdm

from g2rpo_core.foundation.errors import STATUS_FOLDER, TRANSIENT_STATUS, TransientError, UserError, attempt
from g2rpo_core.foundation.files import read_yaml, what_lacks
from g2rpo_core.foundation.profiles import OF_BASE, folders_of
from g2rpo_core.foundation.settings import checked_name
from g2rpo_core.foundation.texts import show_any_text, visible

if TYPE_CHECKING:  # DVC is an extra
    from dvc.stage import Stage

P = ParamSpec("P")
ROOT = Path(__file__).parents[1]  # of the code; data are in the working directory
REPORTS = Path("reports")
OTHERS = REPORTS / "others"  # of profiles that params.yaml does not name, run by hand: git and DVC do not know it
BUSY_TRIES, BUSY_WAIT = 120, 5.0  # seconds between two tries of DVC while another of its runs has the same files


def arguments(description: str, *names: str) -> SimpleNamespace:
    """Return the named command-line arguments of a stage, all required except `study`."""
    parser = ArgumentParser(description=description)
    for name in names:
        parser.add_argument(f"--{name}", required=name != "study")
    given = SimpleNamespace(**{"study": None, **vars(parser.parse_args())})
    for name in ("profile", "method", "study"):
        if (value := getattr(given, name, None)) is not None:
            checked_name(value.replace(OF_BASE, "-") if name == "study" else value, f"--{name}")
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
    """Return the paths of the profile's own runs, or of a study or one of its bases with it.

    What has no profile in its path is of the profile that params.yaml names; that of another one is in OTHERS.
    """
    if study is None:
        params = Path("params.yaml")
        named = read_yaml(params) if params.exists() else {}
        reports = REPORTS if not isinstance(named, dict) or named.get("profile", profile) == profile else OTHERS / profile
        return RunPaths(profile, Path("runs", profile), Path("evaluations", profile), reports, Path("dvc.lock"))
    home = Path("studies", study)
    return RunPaths(str(home), home / "runs", home / "evaluations", home / "reports", home / "dvc.lock")


def model_folders(args: SimpleNamespace) -> tuple[Path, Path]:
    """Return the folders of models and embeddings: the profile's, or those of one of a study's bases (`--study my_study/base-2`)."""
    return folders_of(args.profile, args.study)


def declared_code(stage: str) -> list[Path]:
    """Return the packages and files of code that a stage declares to DVC; a run can resume while they stay the same."""
    stages = read_yaml(ROOT / "dvc.yaml")["stages"]
    return [ROOT / path for path in stages[stage]["deps"] if path.startswith(("g2rpo_core/", "stages/"))]


def sections(args: SimpleNamespace, *names: str) -> SimpleNamespace:
    """Return the named sections of a profile that was checked as a whole, with the study's changes; a stage sees no others.

    Compute by the profile's numerics from now on. With the section `methods` comes `run`, which resolves one of its entries; `drawn` is
    written into the resolved profile by the stage `profile`.
    """
    # Late, so that --help does not wait for torch
    from g2rpo_core.config import evaluated_together, load_profile, load_study, profile_path, study_path
    from g2rpo_core.numerics.portable import use

    study = load_study(args.study) if args.study else None
    if study and study.profile != args.profile:
        raise UserError(f"--profile {args.profile}: {study_path(args.study)} names profile {study.profile}: give that one")
    loaded = load_profile(profile_path(args.profile), study)
    use(loaded.numerics)
    more: dict[str, object] = {"run": loaded.run} if "methods" in names else {}
    if "drawn" in names:
        more["drawn"] = loaded.drawn(*evaluated_together(args.profile, study))
    return SimpleNamespace(**{name: getattr(loaded, name) for name in names if name not in more}, **more)


def commit(stage: str, args: SimpleNamespace, paths: RunPaths, unchanged: Callable[[], bool]) -> bool:
    """Commit to DVC the outputs of a stage that DVC did not start: the next `dvc repro` would delete them and run it again.

    Only if DVC's own command of that stage is this one, and `unchanged`: settings and dependencies are those that it began with.
    Return whether DVC knows them now, or there is no DVC here; False of a stage that DVC started, as it looks at them later.
    """
    project = paths.lock.parent
    if "DVC_STAGE" in os.environ or not (project / ".dvc").exists():
        return "DVC_STAGE" not in os.environ
    if options_of(stage, project) != {name: value for name, value in vars(args).items() if value is not None}:
        print(
            f"DVC does not know this run: {project / 'params.yaml'} does not name its profile, method and seed", file=sys.stderr
        )
        return False
    if not attempt(unchanged)[0]:  # or no longer readable
        print("DVC does not know this run: its settings, code or inputs have changed since it began", file=sys.stderr)
        return False
    done = update_profile(project)
    if (
        not done.returncode and stage.startswith("train@") and project == Path(".")
    ):  # it depends on what it starts from, or on nothing
        done = _dvc("repro", "--single-item", "published", project=project)
    if not done.returncode:
        done = _dvc("commit", "--force", stage, project=project)
    if done.returncode:
        why = done.stderr.strip().split("\n")[-1]
        keep = commit_command(stage, project)
        print(f"DVC does not know this run yet ({why}); before the next dvc repro, run: {keep}", file=sys.stderr)
        return False
    print(f"dvc status knows this run as {stage}")
    return True


def options_of(stage: str, project: Path) -> dict[str, str]:
    """Return the options of the command by which DVC would run a stage (`train@g2rpo-1`); empty if it has no such stage."""
    try:
        from dvc.exceptions import DvcException
    except ImportError:
        return {}
    try:
        words = shlex.split(str(load_stage(stage, project).cmd))
    except (DvcException, OSError):
        return {}
    return {word.removeprefix("--"): value for word, value in zip(words, words[1:]) if word.startswith("--")}


def load_stage(stage: str, project: Path) -> "Stage":
    """Load a stage (`train@g2rpo-1`) of the DVC project in a folder; given a name alone, DVC reads the dvc.yaml of the working folder."""
    from dvc.repo import Repo

    return Repo(str(project)).stage.load_one(path=str(project / "dvc.yaml"), name=stage)


def commit_command(stage: str, project: Path) -> str:
    """Return what to type, in the main project's folder, so that DVC keeps the outputs of a stage as they are."""
    return f"{'' if project == Path('.') else f'cd {project} && '}dvc commit -f {stage}"


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
    """Turn a UserError, and what the machine lacks, into one line and exit status 1, or 75 if the same command may work later.

    Ctrl-C and SIGTERM end it in one line with status 143.
    """

    @functools.wraps(main)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        show_any_text()
        if threading.current_thread() is threading.main_thread():
            # From here on Ctrl-C and SIGTERM are handled below, see stages/__init__.py
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, signal.default_int_handler)
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
            line = what_lacks(error, "finished work is kept: make room, and the same command resumes from it")
            if line is None:
                raise
            say(f"error: {visible(line)}")
            sys.exit(1)
        except KeyboardInterrupt:  # when no checkpoint has to be written first
            for number in (signal.SIGINT, signal.SIGTERM):  # one is enough
                signal.signal(number, signal.SIG_IGN)
            if os.environ.get("RANK", "0") == "0":
                say("error: stopped; finished work is kept, and the same command resumes from it")
            sys.exit(128 + signal.SIGTERM)

    return run


def say(line: str) -> None:
    """Print one line on stderr, below the progress bars, which it closes."""
    # tqdm has no public list of its bars
    for bar in list(getattr(tqdm, "_instances", ())):
        bar.close()
    print(line, file=sys.stderr)


@contextmanager
def renewed(folder: Path, last: str) -> Iterator[Path]:
    """Make a folder anew in the block, as DVC removes outputs before a run; if that fails, the old one is there as it was.

    It may be a symlink, which stays. After a kill in the block, the next start puts the old one back first; last: the file that
    is written last, so that with it the new one is whole.
    """
    there = folder.resolve()
    old = there.with_name(f".{there.name}.old")
    if (there / last).exists():
        shutil.rmtree(old, ignore_errors=True)
    elif old.exists():
        shutil.rmtree(there, ignore_errors=True)
        old.rename(there)
    if there.exists():
        there.rename(old)
    try:
        there.mkdir(parents=True)
        yield folder
    except BaseException:
        shutil.rmtree(there, ignore_errors=True)
        if old.exists():
            old.rename(there)
        raise
    shutil.rmtree(old, ignore_errors=True)
