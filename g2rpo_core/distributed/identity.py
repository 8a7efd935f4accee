"""What decides a run: settings, code, inputs, PyTorch's version and the numerics, as one digest."""

import hashlib
import json
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from g2rpo_core.foundation.errors import attempt
from g2rpo_core.foundation.manifest import read_sealed, sha256, write_sealed
from g2rpo_core.foundation.settings import Settings
from g2rpo_core.hub.made import files_of
from g2rpo_core.numerics.portable import in_use

# Of large files: path -> what `_stamp` says of it, and its hash
HASHES = Path(".cache", "hashes.json")
LARGE = 2**24  # bytes; smaller files are read at every start
SETTLED = 2.0  # seconds without a change until a time of change tells one edit from the next


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
    place = lambda path, file: Path(*path.parts[-2:]) / file.relative_to(path)
    files = [(place(path, file), file) for path in dependencies for file in files_of(path)]
    hashes = _hashes([file for _, file in files])
    contents = {f"content of {named}": hashes[file] for named, file in files}
    return {**values, **contents, "torch": torch.__version__, "numerics": in_use()}


def _hashes(files: Iterable[Path]) -> dict[Path, str]:
    """Return the SHA-256 of each file.

    A large one is not read again while its inode, size and times of change stay the same.
    """
    # None yet, or damaged: everything is read
    known = attempt(lambda: read_sealed(HASHES))[0] or {}
    large = {file: _stamp(file) for file in files if file.stat().st_size > LARGE}
    unread = [
        file for file in files if file not in large or known.get(str(file), [])[:-1] != large[file]
    ]
    with ThreadPoolExecutor() as pool:
        found = dict(zip(unread, pool.map(sha256, unread)))
    # Remember those that nobody was writing
    settled = lambda file: (
        _stamp(file) == large[file] and time.time() - max(large[file][2:]) / 1e9 > SETTLED
    )
    if new := {
        str(file): [*large[file], found[file]] for file in unread if file in large and settled(file)
    }:
        there = {name: about for name, about in known.items() if Path(name).exists()}
        write_sealed(HASHES, there | new)
    return found | {file: known[str(file)][-1] for file in large if file not in found}


def _stamp(file: Path) -> list[int]:
    about = file.stat()
    return [about.st_ino, about.st_size, about.st_mtime_ns, about.st_ctime_ns]


def digest(identity: Mapping[str, str]) -> str:
    """Return the name of a run's folder."""
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16]
