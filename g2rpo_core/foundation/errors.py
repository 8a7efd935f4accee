"""Errors that the user can cause and fix."""

import os
from collections.abc import Callable
from importlib.util import find_spec
from typing import TypeVar

from g2rpo_core.foundation.texts import visible

T = TypeVar("T")
TRANSIENT_STATUS = os.EX_TEMPFAIL  # 75: the exit status of a stage that failed by a TransientError
# The environment variable with the folder where a process that accelerate started leaves a file
# named by its exit status
STATUS_FOLDER = "G2RPO_STATUS_FOLDER"


class UserError(Exception):
    """An error that the user can fix. Its text is one line: what is wrong, where, and what to do.

    Names and texts from outside are escaped, so that they cannot control a terminal (see
    `texts.visible`).
    """

    def __init__(self, text: str):
        super().__init__(visible(text))


class TransientError(UserError):
    """An error that may pass by itself, as of a server that does not answer: try again later."""


def require(command: str, extra: str, *modules: str) -> None:
    """Raise a UserError naming the extra to install, if one of these modules is missing."""
    for module in modules:
        if find_spec(module) is None:
            raise UserError(f"{command} needs {module}: pip install 'g2rpo[{extra}]'")


def attempt(
    make: Callable[[], T], error: type[Exception] | tuple[type[Exception], ...] = UserError
) -> tuple[T | None, list[str]]:
    """Return what `make` returns and no messages; or None and the message of its `error`."""
    try:
        return make(), []
    except error as problem:
        return None, [str(problem)]
