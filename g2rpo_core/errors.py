"""Errors that the user can cause and mend."""

import os
from pathlib import Path

from g2rpo_core.texts import visible

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
