"""What all stages share: reading their sections of the profile, and ending in one line on an error that the user can fix."""

import functools
import json
import os
import shutil
import signal
import sys
import threading
from argparse import ArgumentParser
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

from tqdm import tqdm

from g2rpo_core.errors import TRANSIENT_STATUS, TransientError, UserError
from g2rpo_core.files import is_full, read_yaml
from g2rpo_core.settings import checked_name
from g2rpo_core.texts import visible

ROOT = Path(__file__).parents[1]  # of the code; data are in the working directory
REPORTS = Path("reports")
REVISIONS = REPORTS / "revisions"  # committed: what was looked up on the hub, of models and of prompts
# the environment variable with the folder in which a process that accelerate started leaves a file named by its exit status
STATUS_FOLDER = "G2RPO_STATUS_FOLDER"


def arguments(description: str, *names: str) -> SimpleNamespace:
    """The named command-line arguments of a stage, all required except `study`."""
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
    """The folders of runs, evaluations and reports: those of params.yaml, or of a study.

    timings: seconds differ from run to run, so they are outside what DVC hashes; lock: DVC's; repro: the command that runs a
    stage.
    """

    name: str
    runs: Path
    evaluations: Path
    reports: Path
    lock: Path
    repro: str

    @property
    def timings(self) -> Path:
        return self.reports / "timings"


def run_paths(profile: str, study: str | None) -> RunPaths:
    """The paths of the profile's own runs, or of a study with it."""
    if study is None:
        return RunPaths(profile, Path("runs", profile), Path("evaluations", profile), REPORTS, Path("dvc.lock"), "dvc repro")
    home = Path("studies", study)
    return RunPaths(
        str(home), home / "runs", home / "evaluations", home / "reports", home / "dvc.lock", f"cd {home} && dvc repro"
    )


def declared_code(stage: str) -> list[Path]:
    """The packages and files of code that a stage declares to DVC; a run can resume as long as they stay the same."""
    stages = read_yaml(ROOT / "dvc.yaml")["stages"]
    return [ROOT / path for path in stages[stage]["deps"] if path.startswith(("g2rpo_core/", "stages/"))]


def sections(args: SimpleNamespace, *names: str) -> SimpleNamespace:
    """The named sections of a profile that was checked as a whole, with the study's changes; a stage sees no others."""
    from g2rpo_core.config import load_profile, load_study, profile_path  # imports torch, which would slow down --help

    loaded = load_profile(profile_path(args.profile), load_study(args.study) if args.study else None)
    return SimpleNamespace(**{name: getattr(loaded, name) for name in names})


def ends_in_one_line(main: Callable[[], None]) -> Callable[[], None]:
    """Turns a UserError into one line and exit status 1, or 75 if the same command may work later."""

    @functools.wraps(main)
    def run() -> None:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, signal.default_int_handler)  # see stages/__init__.py
        try:
            main()
        except UserError as error:
            say(f"error: {error}")
            status = TRANSIENT_STATUS if isinstance(error, TransientError) else 1
            if STATUS_FOLDER in os.environ:
                Path(os.environ[STATUS_FOLDER], str(status)).touch()
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
    """Prints one line on stderr, below the progress bars, which it closes."""
    for bar in list(getattr(tqdm, "_instances", ())):  # there is no public list of them
        bar.close()
    print(line, file=sys.stderr)


def fresh(folder: Path) -> Path:
    """`folder`, new and empty: what an earlier run by hand left is removed, as DVC removes outputs before a run."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


def write_json(path: Path, data: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(data, indent=1) + "\n")
