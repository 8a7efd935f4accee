"""What decides a run: settings, code, inputs, PyTorch's version and the numerics, as one digest."""

import hashlib
import json
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import torch

from g2rpo_core.foundation.manifest import sha256
from g2rpo_core.foundation.settings import Settings
from g2rpo_core.hub.made import files_of
from g2rpo_core.numerics.portable import in_use


def identity_of(settings: Mapping[str, object], dependencies: Iterable[Path]) -> dict[str, str]:
    """Return all that decides a run, as texts by name: two runs with the same are one.

    settings: values and typed sections; dependencies: files and folders whose content decides.
    """
    values: dict[str, str] = {}
    for section, value in settings.items():
        fields = (
            {f"{section}.{key}": field for key, field in value.deciding().items()}
            if isinstance(value, Settings)
            else {}
        )
        values |= {
            key: json.dumps(field, sort_keys=True)
            for key, field in (fields or {section: value}).items()
        }
    # Without the folders above them, so that a checkout that is mounted elsewhere resumes
    files = {
        Path(*path.parts[-2:]) / file.relative_to(path): file
        for path in dependencies
        for file in files_of(path)
    }
    with ThreadPoolExecutor() as pool:
        contents = {
            f"content of {named}": hashed
            for named, hashed in zip(
                files, pool.map(lambda file: _hash(file, file.stat().st_ctime_ns), files.values())
            )
        }
    return {**values, **contents, "torch": torch.__version__, "numerics": in_use()}


@cache
def _hash(file: Path, changed: int) -> str:
    """Return a file's SHA-256, read once in a process; changed: its system's time of that."""
    # Kept in no file: size and times are what a damaged cache keeps, too
    return sha256(file)


def digest(identity: Mapping[str, str]) -> str:
    """Return the name of a run's folder."""
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16]
