"""Reuses what this checkout has made for another profile: equal inputs make equal files."""

import hashlib
import json
import os
import shutil
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path

from g2rpo_core.foundation.errors import attempt
from g2rpo_core.foundation.files import files_in
from g2rpo_core.foundation.manifest import read_sealed, sha256, write_sealed
from g2rpo_core.foundation.runs import hash_of
from g2rpo_core.foundation.settings import Settings
from g2rpo_core.foundation.texts import echo

# By key: the folder that was made, and its hash
MADE = Path(".cache", "made")


def key_of(settings: Settings, dependencies: Iterable[Path], *others: str) -> str:
    """Return a hash of all that decides an output.

    Settings, PyTorch's version, the content of files and folders, and others: the numerics in use
    and the version of the code.
    """
    contents = [
        (str(file.relative_to(path)), sha256(file))
        for path in dependencies
        for file in files_of(path)
    ]
    decides = json.dumps([settings.deciding(), contents, version("torch"), others], sort_keys=True)
    return hashlib.sha256(decides.encode()).hexdigest()[:16]


def reuse(key: str, output: Path) -> bool:
    """Make the folder `output` of links to what was made under this key; tell whether there is any.

    `output` stays as it is if there is no other folder, or if its content has changed since.
    """
    if not (about := attempt(lambda: read_sealed(MADE / f"{key}.json"))[0]):
        return False  # never made, or damaged
    source, there = Path(about["folder"]), output.resolve()
    if not source.is_dir() or source.resolve() == there:
        return False
    linked = there.with_name(f".{there.name}.linked")
    shutil.rmtree(linked, ignore_errors=True)
    shutil.copytree(source.resolve(), linked, copy_function=link)
    if hash_of(linked) != about["hash"]:
        shutil.rmtree(linked)
        return False
    shutil.rmtree(there, ignore_errors=True)
    linked.rename(there)
    echo(f"{output}: the settings, code and inputs of {source}, so its files are used")
    return True


def note(key: str, output: Path) -> None:
    """Note that `output` is what was made under this key, for `reuse`."""
    write_sealed(MADE / f"{key}.json", {"folder": str(output), "hash": hash_of(output)})


def files_of(path: Path) -> list[Path]:
    """Return the files of a folder, as `files_in`, or a file itself."""
    return [path] if path.is_file() else sorted(path / name for name in files_in(path))


def link(source: str, target: str) -> None:
    """Link a file, or copy it where the file system has no hard links."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
