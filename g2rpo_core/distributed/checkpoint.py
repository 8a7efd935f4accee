"""Exact resume: where a run was, in a scratch folder that belongs to its settings, code and inputs alone.

The folder is named by a fingerprint of all these, so that a change of any never continues stale state, and lies outside the
declared outputs, which DVC removes before a run. Everything is written aside and renamed: what has its final name is whole.
"""

import hashlib
import json
import os
import re
import shutil
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch

from g2rpo_core.common.model_store import sha256
from g2rpo_core.distributed.process_group import ProcessGroup
from g2rpo_core.errors import UserError
from g2rpo_core.settings import Settings

ROOT = Path(".cache", "resume")
MANIFEST = "manifest.json"
IDENTITY = "identity.json"


def scratch(
    stage: str,
    name: str,
    settings: Mapping[str, object],
    dependencies: Iterable[Path],
    processes: ProcessGroup = ProcessGroup(),  # noqa: B008
) -> Path:
    """The scratch folder of a run, for all processes; says in words which leftovers of its name are not continued, and why.

    settings: values and typed sections that decide the run; dependencies: files and folders whose content does, as the stage
    declares them to DVC. The number of processes and PyTorch's version decide too.
    """
    if processes.rank > 0:
        return processes.gather(None)[0]
    identity = _identity(settings, dependencies, processes.size)
    text = json.dumps(identity, sort_keys=True)
    home = ROOT / stage / name
    folder = home / hashlib.sha256(text.encode()).hexdigest()[:16]
    if not folder.exists():
        for other in sorted(home.glob(f"*/{IDENTITY}")):
            theirs = json.loads(other.read_text())
            changed = [key for key in {**theirs, **identity} if theirs.get(key) != identity.get(key)]
            more = f" and {len(changed) - 3} more" if len(changed) > 3 else ""
            print(f"{other.parent} is not continued: other {', '.join(changed[:3])}{more}; it can be deleted", file=sys.stderr)
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / IDENTITY, text.encode())
    return processes.gather(folder)[0]


def _identity(settings: Mapping[str, object], dependencies: Iterable[Path], processes: int) -> dict[str, str]:
    values: dict[str, str] = {}
    for section, value in settings.items():
        fields = {f"{section}.{key}": field for key, field in value.deciding().items()} if isinstance(value, Settings) else {}
        values |= {key: json.dumps(field, sort_keys=True) for key, field in (fields or {section: value}).items()}
    contents = {f"content of {file}": sha256(file) for path in dependencies for file in _files(path)}
    return {**values, **contents, "processes": str(processes), "torch": torch.__version__}


def _files(path: Path) -> list[Path]:
    """What DVC hashes of a dependency: the file, or all files of the folder but Python's caches."""
    found = sorted(path.rglob("*")) if path.is_dir() else [path]
    return [file for file in found if file.is_file() and "__pycache__" not in file.parts]


def save(folder: Path, iteration: int, state: object, keep: int, processes: ProcessGroup = ProcessGroup()) -> Path:  # noqa: B008
    """Writes the state of every process as `folder/iteration-…` and removes all but the newest `keep`; collective.

    state: what `torch.load(weights_only=True)` reads. A process that is killed at any moment leaves the older ones whole.
    """
    final = folder / f"iteration-{iteration:06d}"
    aside = folder / f"{final.name}.tmp"
    if processes.first("there" if final.exists() else None):
        return final
    if processes.rank == 0:
        for unfinished in folder.glob("*.tmp"):
            shutil.rmtree(unfinished, ignore_errors=True)
        aside.mkdir(parents=True)
    processes.barrier()
    mine = aside / f"rank-{processes.rank}.pt"
    with mine.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    sizes = processes.gather(mine.stat().st_size)
    if processes.rank == 0:
        write_whole(aside / MANIFEST, json.dumps({f"rank-{rank}.pt": size for rank, size in enumerate(sizes)}).encode())
        os.rename(aside, final)
        _sync_folder(folder)
        for old in checkpoints(folder)[:-keep]:
            discard(old)
    processes.barrier()
    return final


def checkpoints(folder: Path) -> list[Path]:
    """The whole checkpoints of a folder, oldest first."""
    return sorted(path for path in folder.glob("iteration-*") if re.fullmatch(r"iteration-\d+", path.name))


def load(path: Path, processes: ProcessGroup = ProcessGroup()) -> dict:  # noqa: B008
    """This process's state; UserError where the checkpoint is damaged or another number of processes'."""
    advice = f"delete {path} to go on from the one before, or from the start"
    try:
        sizes = json.loads((path / MANIFEST).read_text())
    except (OSError, ValueError):
        raise UserError(f"{path} is damaged (no readable {MANIFEST}): {advice}") from None
    if len(sizes) != processes.size:
        raise UserError(
            f"{path} was written by {len(sizes)} processes, this run has {processes.size}: set processes to that, or {advice}"
        )
    for name, size in sizes.items():
        found = (path / name).stat().st_size if (path / name).exists() else 0
        if found != size:
            raise UserError(f"{path} is damaged ({name} has {found} of {size} bytes): {advice}")
    return torch.load(path / f"rank-{processes.rank}.pt", map_location="cpu", weights_only=True)


def discard(folder: Path) -> None:
    """Removes a folder; if this is cut short, what is left has no final name."""
    if folder.exists():
        gone = folder.with_name(f"{folder.name}.gone")
        shutil.rmtree(gone, ignore_errors=True)
        folder.rename(gone)
        shutil.rmtree(gone)


def publish(folder: Path, output: Path) -> None:
    """Makes what was built in scratch the output, in one rename where both are on one disk."""
    shutil.rmtree(output, ignore_errors=True)
    output.parent.mkdir(parents=True, exist_ok=True)
    shutil.move(folder, output)


def write_whole(path: Path, data: bytes) -> None:
    """Writes a file aside and renames it, on disk before it has its name."""
    aside = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    with aside.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    aside.rename(path)


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
