"""Manifests: small files that say that others are whole, by the size and SHA-256 of each.

A file that only says "done" does not say of what: what it stands for may be cut, changed or gone
by the time that somebody relies on it. Every note of this project that another file or folder is
complete is a manifest, written after what it names is on the disk, and compared with it when it is
read. A manifest has its own hash, so that a damaged one is no manifest.
"""

import hashlib
import json
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from g2rpo_core.foundation.errors import UserError
from g2rpo_core.foundation.files import (
    complaint,
    files_in,
    in_one_line,
    read_json,
    reading,
    sync,
    write_whole,
)
from g2rpo_core.foundation.texts import echo, visible

Files = Mapping[str, Mapping[str, Any]]  # path within a folder -> size in bytes, sha256


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def describe_files(folder: Path, names: Iterable[str] | None = None) -> dict[str, dict]:
    """Return path within `folder` -> size in bytes and SHA-256, for all files below it or these."""
    return {
        name: {"size": (folder / name).stat().st_size, "sha256": sha256(folder / name)}
        for name in (files_in(folder) if names is None else sorted(names))
    }


def damages(folder: Path, files: Files, hashed: float = float("inf")) -> list[str]:
    """List what is wrong with files that `describe_files` described, a phrase each.

    hashed: the most bytes of a file whose hash is compared, and not only its size. UserError for a
    file that cannot be read.
    """
    wrong = []
    for name, about in files.items():
        path = folder / name
        with reading(path):
            size = path.stat().st_size if path.is_file() else None
            if size is None:
                wrong.append(f"{name} is gone")
            elif size != about["size"]:
                wrong.append(f"{name} has {size} of {about['size']} bytes")
            elif size <= hashed and sha256(path) != about["sha256"]:
                wrong.append(f"{name} has changed since it was written")
    return wrong


def write_manifest(
    file: Path,
    folder: Path,
    names: Iterable[str] | None = None,
    about: Mapping[str, Any] | None = None,
) -> None:
    """Write a manifest of the files of a folder, all or those named, once these are on the disk.

    about: JSON data that is kept with it.
    """
    files = sorted(names) if names is not None else files_in(folder)
    for path in [*map(folder.joinpath, files), *{(folder / name).parent for name in files}]:
        sync(path)
    content = {"files": describe_files(folder, files), "all": names is None, "about": about or {}}
    write_sealed(file, content)


def find_whole(file: Path, folder: Path, ignored: Iterable[str] = ()) -> Mapping[str, Any] | None:
    """Return `about` of a manifest whose files are as they were written; None if there is none.

    If the manifest or a file is damaged, or if a folder whose files are all named has another one,
    a line on stderr says what is wrong, and None is returned: the caller makes the files again.
    ignored: files that the folder may have beside those. UserError for what may not be read.
    """
    if not file.exists():
        return None
    found: Any = None
    try:
        found = read_sealed(file)
    except UserError as error:
        if isinstance(error.__cause__, PermissionError):  # it may well be whole
            raise
    wrong = damages(folder, found["files"]) if found else [f"{file.name} is damaged"]
    if not wrong and found["all"]:
        surplus = set(files_in(folder)) - found["files"].keys() - set(ignored)
        wrong = [f"{name} does not belong to it" for name in sorted(surplus)]
    if not wrong:
        return found["about"]
    problem = visible(f"{folder}: {in_one_line(wrong)}")
    echo(f"warning: {problem}; it is not used, but made again", file=sys.stderr)
    return None


def write_sealed(file: Path, data: object) -> None:
    """Write JSON data with their hash, so that `read_sealed` notices any change."""
    file.parent.mkdir(parents=True, exist_ok=True)
    write_whole(file, json.dumps({"data": data, "sha256": _digest(data)}))


def read_sealed(file: Path) -> Any:
    """Return the data; UserError if the file is missing, or is not as `write_sealed` wrote it."""
    found = read_json(file, dict)
    with reading(file):
        if found.keys() != {"data", "sha256"} or found["sha256"] != _digest(found["data"]):
            raise UserError(complaint(file, "has changed since it was written"))
        return found["data"]


def _digest(data: object) -> str:
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()
