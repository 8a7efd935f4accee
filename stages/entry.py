"""Reads a stage's arguments and sections; ends it in one line on an error that users can fix."""

import functools
import os
import signal
import sys
from argparse import ArgumentParser, ArgumentTypeError
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, ParamSpec

from tqdm import tqdm

from g2rpo_core.foundation.errors import STATUS_FOLDER, TRANSIENT_STATUS, TransientError, UserError
from g2rpo_core.foundation.files import what_lacks
from g2rpo_core.foundation.profiles import OF_BASE, study_path
from g2rpo_core.foundation.settings import checked_name
from g2rpo_core.foundation.texts import echo, show_any_text, visible
from stages.paths import run_paths
from stages.start import after_imports
from stages.versions import check_recorded

if TYPE_CHECKING:  # its package loads torch
    from g2rpo_core.config import ResolvedRun

P = ParamSpec("P")


def arguments(description: str, *names: str) -> SimpleNamespace:
    """Return the named command-line arguments of a stage, all required except `study`."""
    parser = ArgumentParser(description=description)
    for name in names:
        parser.add_argument(f"--{name}", required=name != "study")
    given = SimpleNamespace(**{"study": None, **vars(parser.parse_args())})
    for name in ("profile", "method", "study"):
        if (value := getattr(given, name, None)) is not None:
            checked_name(value.replace(OF_BASE, "-") if name == "study" else value, f"--{name}")
    if (seed := getattr(given, "seed", "0")) and not (
        seed.isdecimal() and seed.isascii() and int(seed) < 2**64
    ):
        raise UserError(f"--seed {seed!r}: must be a whole number from 0 and less than 2**64")
    return given


def at_least_one(text: str) -> int:
    """Return the count that an option gives, as argparse's `type`."""
    if not text.isdecimal() or int(text) < 1:
        raise ArgumentTypeError(f"must be a whole number from 1 (got {text!r})")
    return int(text)


def sections(args: SimpleNamespace, *names: str) -> SimpleNamespace:
    """Return the named sections of a profile that was checked as a whole; a stage sees no others.

    A study's changes are in them. This process computes by the profile's numerics from now on. With
    the section `methods` comes `run`, which resolves one of its entries; `drawn` is written into
    the resolved profile by the stage `profile`.

    UserError if DVC started this stage for other code.
    """
    check_recorded(run_paths(args.profile, args.study).reports / "profile.yaml")
    # Late, so that --help does not wait for torch
    from g2rpo_core.config import evaluated_together, load_profile, load_study, profile_path
    from g2rpo_core.numerics.portable import use

    study = load_study(args.study) if args.study else None
    if study and study.profile != args.profile:
        raise UserError(
            f"--profile {args.profile}: {study_path(args.study)} names profile {study.profile}: "
            "give that one"
        )
    loaded = load_profile(profile_path(args.profile), study, [getattr(args, "method", "")])
    use(loaded.numerics)
    more: dict[str, object] = {"run": loaded.run} if "methods" in names else {}
    if "drawn" in names:
        more["drawn"] = loaded.drawn(*evaluated_together(args.profile, study))
    return SimpleNamespace(
        **{name: getattr(loaded, name) for name in names if name not in more}, **more
    )


def entry_of(args: SimpleNamespace, settings: SimpleNamespace) -> "ResolvedRun":
    """Return the entry of `methods` to train; UserError if the profile or study has none."""
    if args.method not in settings.methods:
        file = (
            f"{study_path(args.study)}: entries"
            if args.study
            else f"profiles/{args.profile}.yaml: methods"
        )
        raise UserError(f"{file}: there is no {args.method!r}, only {', '.join(settings.methods)}")
    return settings.run(args.method)


def ends_in_one_line(main: Callable[P, None]) -> Callable[P, None]:
    """Turn a UserError, and what the machine lacks, into one line and an exit status.

    That is 1, or 75 if the same command may work later. Ctrl-C and SIGTERM end it in one line with
    status 143.
    """

    @functools.wraps(main)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        show_any_text()
        after_imports()
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
            line = what_lacks(
                error, "finished work is kept: make room, and the same command resumes from it"
            )
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
    echo(line, file=sys.stderr)
