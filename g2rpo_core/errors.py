"""Errors that the user can cause and mend."""

from pathlib import Path


class UserError(Exception):
    """Something that the user can mend. Its text is one line: what is wrong, where, and what to do."""


def made_by(stage: str, path: Path) -> Path:
    """`path`, which the named stage of the pipeline makes; UserError if it has not."""
    if not path.exists():
        raise UserError(f"{path} does not exist; the stage `{stage}` makes it: dvc repro {stage}")
    return path
