"""Errors that the user can cause and fix."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from g2rpo_core.texts import visible

T = TypeVar("T")
TRANSIENT_STATUS = os.EX_TEMPFAIL  # 75: the exit status of a stage that failed by a TransientError


class UserError(Exception):
    """An error that the user can fix. Its text is one line: what is wrong, where, and what to do.

    Names and texts from outside are escaped, so that they cannot control a terminal (see `texts.visible`).
    """

    def __init__(self, text: str):
        super().__init__(visible(text))


class TransientError(UserError):
    """An error that may pass by itself (a hub or a server that does not answer): the same command may work later."""


def made_by(stage: str, path: Path, repro: str = "dvc repro") -> Path:
    """Returns `path`, which the named stage makes; UserError with the command that runs the stage if it does not exist."""
    if not path.exists():
        raise UserError(f"{path} does not exist; the stage `{stage}` makes it: {repro} {stage}")
    return path


def attempt(make: Callable[[], T], error: type[Exception] = UserError) -> tuple[T | None, list[str]]:
    """What `make` returns and no messages; or None and the message of its `error`."""
    try:
        return make(), []
    except error as problem:
        return None, [str(problem)]
