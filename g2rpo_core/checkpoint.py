"""Exact resume: where a run was, in a scratch folder that belongs to its parameters, code and inputs alone.

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

from .errors import UserError
from .model_store import sha256
from .settings import Settings
from .world import World

ROOT = Path(".cache", "resume")
MANIFEST = "manifest.json"
IDENTITY = "identity.json"


# settings that change how a run is made, not what it makes
NOT_DECIDING = {"training.checkpoints", "training.processes", "evaluation.processes"}


def scratch(stage: str, name: str, settings: Mapping[str, object], inputs: Iterable[Path], world: World = World()) -> Path:  # noqa: B008
    """The scratch folder of a run, for all processes; says in words which leftovers of its name are not continued, and why.

    settings: values and typed sections that decide it; inputs: files and folders whose content does. All code of the core and the
    stages, and the number of processes, decide too.
    """
    return world.gather(_scratch(stage, name, settings, inputs, world.size) if world.rank == 0 else None)[0]


def _scratch(stage: str, name: str, settings: Mapping[str, object], inputs: Iterable[Path], processes: int) -> Path:
    identity = _identity(settings, inputs, processes)
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
    return folder


def _identity(settings: Mapping[str, object], inputs: Iterable[Path], processes: int) -> dict[str, str]:
    root = Path(__file__).parents[1]
    code = [file for package in ("g2rpo_core", "stages") for file in (root / package).rglob("*.py")]
    files = [file for path in inputs for file in (path.rglob("*") if path.is_dir() else [path]) if file.is_file()]
    values = {}
    for section, value in settings.items():
        if isinstance(value, Settings):
            fields = {f"{section}.{key}": one for key, one in value.model_dump(mode="json").items()}
            values |= {key: json.dumps(one, sort_keys=True) for key, one in fields.items() if key not in NOT_DECIDING}
        else:
            values[section] = json.dumps(value)
    return {
        **values,
        **{f"content of {file}": sha256(file) for file in sorted(files)},
        **{f"code in {file.relative_to(root)}": sha256(file) for file in sorted(code)},
        "processes": str(processes),
        "torch": torch.__version__,
    }


def save(folder: Path, iteration: int, state: object, keep: int, world: World = World()) -> Path:  # noqa: B008
    """Writes the state of every process as `folder/iteration-…` and removes all but the newest `keep`; collective.

    state: what `torch.load(weights_only=True)` reads. A process that is killed at any moment leaves the older ones whole.
    """
    final = folder / f"iteration-{iteration:06d}"
    aside = folder / f"{final.name}.tmp"
    if world.first("there" if final.exists() else None):
        return final
    if world.rank == 0:
        for unfinished in folder.glob("*.tmp"):
            shutil.rmtree(unfinished, ignore_errors=True)
        aside.mkdir(parents=True)
    world.barrier()
    mine = aside / f"rank-{world.rank}.pt"
    with mine.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    sizes = world.gather(mine.stat().st_size)
    if world.rank == 0:
        write_whole(aside / MANIFEST, json.dumps({f"rank-{rank}.pt": size for rank, size in enumerate(sizes)}).encode())
        os.rename(aside, final)
        _sync_folder(folder)
        for old in checkpoints(folder)[:-keep]:
            discard(old)
    world.barrier()
    return final


def checkpoints(folder: Path) -> list[Path]:
    """The whole checkpoints of a folder, oldest first."""
    return sorted(path for path in folder.glob("iteration-*") if re.fullmatch(r"iteration-\d+", path.name))


def load(path: Path, world: World = World()) -> dict:  # noqa: B008
    """This process's state; UserError where the checkpoint is damaged or another world's."""
    advice = f"delete {path} to go on from the one before, or from the start"
    try:
        sizes = json.loads((path / MANIFEST).read_text())
    except (OSError, ValueError):
        raise UserError(f"{path} is damaged (no readable {MANIFEST}): {advice}") from None
    if len(sizes) != world.size:
        raise UserError(
            f"{path} was written by {len(sizes)} processes, this run has {world.size}: set processes to that, or {advice}"
        )
    for name, size in sizes.items():
        found = (path / name).stat().st_size if (path / name).exists() else 0
        if found != size:
            raise UserError(f"{path} is damaged ({name} has {found} of {size} bytes): {advice}")
    return torch.load(path / f"rank-{world.rank}.pt", map_location="cpu", weights_only=True)


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
