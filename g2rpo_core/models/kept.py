"""Keeps numbers that are slow to trace in .cache/traced, by code, versions and arguments."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from g2rpo_core.foundation.errors import attempt
from g2rpo_core.foundation.files import files_in
from g2rpo_core.foundation.manifest import read_sealed, write_sealed

FOLDER = Path(".cache", "traced")
CODE = ("architectures", "models")  # packages of the core that trace
PACKAGES = ("diffusers", "peft", "torch", "transformers")


def kept(
    what: str, decides: object, make: Callable[[], Mapping[str, Any]], code: Sequence[str] = CODE
) -> Mapping[str, Any]:
    """Return what `make` returned for equal `what` and `decides`; call it if no file tells.

    decides: data with a complete `repr`; code: packages of the core that `make` runs.
    """
    # No expiry: whatever could change the numbers changes the key
    key = hashlib.sha256(repr((what, decides, _identity(*code))).encode()).hexdigest()[:32]
    file = FOLDER / f"{key}.json"
    if known := attempt(lambda: read_sealed(file))[0]:
        return known
    numbers = make()
    with suppress(OSError):  # no room, or a folder that cannot be written: it is traced again
        write_sealed(file, numbers)
    return numbers


@cache
def _identity(*packages: str) -> tuple[str, ...]:
    """Return the hash of the code that traces, and the versions of what it traces."""
    core = Path(__file__).resolve().parent.parent
    files = [core / name / file for name in packages for file in files_in(core / name)]
    read = (file.read_bytes() for file in files if file.suffix == ".py")
    code = hashlib.sha256(b"".join(read)).hexdigest()
    return code, *(version(package) for package in PACKAGES)
