"""Errors that the user can cause and mend."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from g2rpo_core.texts import visible

T = TypeVar("T")
TRANSIENT_STATUS = os.EX_TEMPFAIL  # 75: the exit status of a stage that failed by a TransientError


class UserError(Exception):
    """Something that the user can mend. Its text is one line: what is wrong, where, and what to do.

    Names and texts from outside stand in it so that they steer no terminal (see `texts.visible`).
    """

    def __init__(self, text: str):
        super().__init__(visible(text))


class TransientError(UserError):
    """Something that may pass by itself (a hub or a server that does not answer): the same command may work later."""


def made_by(stage: str, path: Path, repro: str = "dvc repro") -> Path:
    """`path`, which the named stage of the pipeline makes; UserError, with the command that runs it, if it has not."""
    if not path.exists():
        raise UserError(f"{path} does not exist; the stage `{stage}` makes it: {repro} {stage}")
    return path


def attempt(make: Callable[[], T], error: type[Exception] = UserError) -> tuple[T | None, list[str]]:
    """What `make` returns and no complaint; or None and what its `error` says."""
    try:
        return make(), []
    except error as problem:
        return None, [str(problem)]
