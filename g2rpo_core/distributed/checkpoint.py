"""Keeps the state of a run for an exact resume, in a scratch folder of its own.

The folder's name is a hash of settings, code and inputs, so that a change of any never continues
from stale state. It is outside the declared outputs, which DVC removes before a run. Everything is
written under a temporary name and renamed: what has its final name is complete.
"""

import filecmp
import json
import os
import pickle
import platform
import re
import shutil
import sys
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from g2rpo_core.distributed.identity import digest, identity_of
from g2rpo_core.distributed.process_group import ALONE, TIMEOUT, ProcessGroup
from g2rpo_core.foundation import claims
from g2rpo_core.foundation.errors import UserError, attempt
from g2rpo_core.foundation.files import (
    complaint,
    is_full,
    read_json,
    reading,
    sync,
    write_whole,
)
from g2rpo_core.foundation.manifest import (
    damages,
    describe_files,
    find_whole,
    read_sealed,
)
from g2rpo_core.foundation.runs import HELDOUT_CURVE, SCRATCH, TRAINING_RECORDS
from g2rpo_core.foundation.texts import echo, natural, some
from g2rpo_core.hub.made import link
from g2rpo_core.numerics.portable import Numerics

ROOT = SCRATCH
FINISHED = "finished.json"  # in scratch: manifest of a finished run's `out`, with its records
MANIFEST = "manifest.json"
RECORDS = "records.json"
SEEN = "seen"
VISIBLE_WITHIN = 30.0  # seconds until another node's file is visible on a network file system
IDENTITY = "identity.json"
KEPT = ".kept"  # ends the name of a folder with the last checkpoint of a finished run
# What a longer run does not take from a shorter one: only checkpoints and snapshots
OF_ONE_ATTEMPT = (IDENTITY, FINISHED, SEEN, "out", "*.published", "*.tmp", "*.gone")
INDEX = {  # what an index that torch.distributed.checkpoint has written names, by module
    "torch": ("Size",),
    "torch.serialization": ("_get_layout",),
    "torch.distributed.checkpoint.metadata": (
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorStorageMetadata",
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "TensorProperties",
        "_MEM_FORMAT_ENCODING",
    ),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "pathlib": ("PosixPath",),
}
# The members of the only enum of an index, by the arguments of `getattr`
MEMBERS = {
    (dcp.metadata._MEM_FORMAT_ENCODING, member.name): member
    for member in dcp.metadata._MEM_FORMAT_ENCODING
}


def scratch(
    stage: str,
    name: str,
    settings: Mapping[str, object],
    dependencies: Iterable[Path],
    processes: ProcessGroup = ALONE,
    end: str | None = None,
) -> Path:
    """Return the scratch folder of a run, for all processes.

    Prints which leftovers of the run are not resumed, and why. settings: values and typed sections
    that decide the run; dependencies: files and folders whose content does, as the stage declares
    them to DVC. PyTorch's version decides too; the number of processes does not. end: the setting
    that only decides after which iteration the run ends: a new run goes on from the last checkpoint
    of one that differs in that alone.
    """
    if processes.rank > 0:
        return _shared(None, processes)
    # Name the folder after all that decides the run
    identity = identity_of(settings, dependencies)
    home = ROOT / stage / name
    folder = home / digest(identity)
    if not folder.exists():
        _go_on(folder, identity, end)
    for left in home.glob("*.gone"):
        shutil.rmtree(left, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / IDENTITY, json.dumps(identity, sort_keys=True).encode())
    return _shared(folder, processes)


def resumes_after(
    stage: str,
    name: str,
    settings: Mapping[str, object],
    dependencies: Iterable[Path],
    end: str | None,
    numerics: Numerics,
) -> int:
    """Return the iteration after which a run would go on, 0 if it begins; writes no run's state.

    The arguments are those of `scratch`, and the numerics that the run computes with, which this
    process need not.
    """
    identity = identity_of(settings, dependencies) | {"numerics": numerics}
    home = ROOT / stage / name
    others = [other for other, changed, _ in _others(home, identity) if changed in ([], [end])]
    after = map(last_iteration, [home / digest(identity), *others])
    most = int(identity[end]) if end else None
    return max((each for each in after if most is None or each <= most), default=0)


def _others(
    home: Path, identity: Mapping[str, str]
) -> Iterator[tuple[Path, list[str], dict[str, str]]]:
    """Yield the folders of other attempts: what differs from this identity, and their own."""
    for file in sorted(home.glob(f"*/{IDENTITY}")):
        # Only reported, so it may be unreadable
        theirs = attempt(partial(read_json, file, of=dict))[0] or {}
        changed = [key for key in {**theirs, **identity} if theirs.get(key) != identity.get(key)]
        if changed:
            yield file.parent, changed, theirs


def _go_on(folder: Path, identity: Mapping[str, str], end: str | None) -> None:
    """Take the checkpoints of an earlier attempt that only had another end into a new folder.

    Print which attempt that is, and why another one is not resumed.
    """
    for other, changed, theirs in _others(folder.parent, identity):
        if (
            end
            and changed == [end]
            and last_iteration(folder) < last_iteration(other) <= int(identity[end])
        ):
            last = checkpoints(other)[-1]
            taken = shutil.ignore_patterns(*OF_ONE_ATTEMPT)
            shutil.copytree(other, folder, ignore=taken, copy_function=link, dirs_exist_ok=True)
            echo(
                f"goes on from {last}: only {end} changed, from {theirs[end]} to {identity[end]}",
                file=sys.stderr,
            )
        else:
            kept = "keeps the finished run of other settings"
            echo(
                f"{other} {kept if (other / FINISHED).exists() else 'is not resumed'}: "
                f"{some(changed)} changed; it can be deleted",
                file=sys.stderr,
            )


def still_decide(
    folder: Path, settings: Mapping[str, object], dependencies: Iterable[Path]
) -> bool:
    """Tell whether settings and dependencies are still those that `scratch` named the folder by."""
    return folder.name == digest(identity_of(settings, dependencies))


def claim(stage: str, name: str, processes: ProcessGroup = ALONE) -> None:
    """Reserve a run for this group until its last process has ended; UserError if it is taken.

    Collective. This is a system lock on a file: the first process takes it exclusively, then all
    processes share it, so that it is free when all have ended, however they end.
    """
    owner, problems = (
        attempt(lambda: claims.take(stage, name)) if processes.rank == 0 else (None, [])
    )
    if problem := processes.first(problems[0] if problems else None):
        raise UserError(problem)
    path, owner = processes.gather((claims.lock_of(stage, name), owner))[0]
    _wait_until_seen(path, owner, processes)
    if processes.rank > 0:
        claims.share(path)
    processes.barrier()


def _shared(folder: Path | None, processes: ProcessGroup) -> Path:
    """Return the first process's folder once all see it; UserError if a node has another disk."""
    written = uuid.uuid4().hex
    if folder:
        write_whole(folder / SEEN, written.encode())
    folder, written = processes.gather((folder, written))[0]
    _wait_until_seen(folder / SEEN, written, processes)
    return folder


def _wait_until_seen(file: Path, written: str, processes: ProcessGroup) -> None:
    """Wait until all read what the first process wrote; UserError if a node has another disk."""
    end = time.monotonic() + VISIBLE_WITHIN
    while not (seen := file.exists() and file.read_text() == written) and time.monotonic() < end:
        time.sleep(0.2)
    if where := processes.first(None if seen else platform.node()):
        raise UserError(
            f"{file.parent.resolve()} as seen from {where} is not the first process's folder: "
            "the project's folder must be on a disk that all nodes share"
        )


class Checkpoints:
    """A run's checkpoints in its scratch folder, written one at a time in the background.

    A checkpoint holds tensors, written by `torch.distributed.checkpoint` with one part per process,
    so that any number of processes may read it; the records as JSON; and a manifest with the size
    and hash of every file. What is incomplete has no final name.

    Every method is collective.
    """

    def __init__(self, folder: Path, keep: int, processes: ProcessGroup = ALONE):
        self.folder, self.keep, self.processes = folder, keep, processes
        # A separate group: collectives in the background would mix with those of training
        self._group = (
            dist.new_group(backend="gloo", timeout=TIMEOUT) if processes.size > 1 else None
        )
        self._background = ThreadPoolExecutor(1)
        self._unfinished: tuple[Path, Future] | None = None
        # before anything is written: what a killed run left may be most of the disk
        if processes.rank == 0:
            for left in (*folder.glob("*.tmp"), *folder.glob("*.gone")):
                shutil.rmtree(left, ignore_errors=True)

    def save(self, iteration: int, state: dict, records: list[dict]) -> None:
        """Start to write once the previous one is finished; `state` (tensors) may then change."""
        self.finish()
        final = self.folder / f"iteration-{iteration:06d}"
        if self.processes.first("there" if final.exists() else None):
            return
        temporary = final.with_name(f"{final.name}.tmp")
        if self.processes.rank == 0:
            temporary.mkdir(parents=True)
            write_whole(temporary / RECORDS, json.dumps(records).encode())
        self.processes.barrier()
        writing = dcp.async_save(
            state,
            checkpoint_id=temporary,
            process_group=self._group,
            no_dist=self.processes.size == 1,
        )
        self._unfinished = (
            final,
            self._background.submit(_hash_part, writing, temporary, self.processes.rank),
        )

    def publish(self) -> None:
        """Give a checkpoint that is written its final name; does not wait."""
        waiting = self._unfinished is not None and not self._unfinished[1].done()
        if not self.processes.first("waiting" if waiting else None):
            self.finish()

    def finish(self) -> None:
        """Wait until the checkpoint has its final name; remove all but the newest `keep`."""
        if self._unfinished is None:
            return
        (final, written), self._unfinished = self._unfinished, None
        temporary = final.with_name(f"{final.name}.tmp")
        problem = (
            f"{temporary} cannot be written: {_why(error)}"
            if (error := written.exception())
            else None
        )
        if problem := self.processes.first(problem):
            raise UserError(f"{problem}; the previous checkpoint is kept")
        files = {
            name: about
            for part in self.processes.gather(written.result())
            for name, about in part.items()
        }
        if self.processes.rank == 0:
            write_whole(
                temporary / MANIFEST,
                json.dumps({"processes": self.processes.size, "files": files}).encode(),
            )
            os.rename(temporary, final)
            sync(self.folder)
            for old in checkpoints(self.folder)[: -self.keep]:
                discard(old)
        self.processes.barrier()


def _why(error: BaseException) -> str:
    """Return the reason in one line: torch's writer has a whole traceback as an error's text."""
    if is_full(error) or shutil.disk_usage(Path.cwd()).free < 2**16:
        return "the disk is full; make room, and the same command resumes"
    return (str(error).strip().splitlines() or [type(error).__name__])[-1]


def _hash_part(writing: Future, folder: Path, rank: int) -> dict[str, dict]:
    """Wait for the files of a process; return the size and SHA-256 of each."""
    writing.result()
    files = list(folder.glob(f"__{rank}_*"))  # as torch.distributed.checkpoint names them
    if rank == 0:
        files += [folder / RECORDS, folder / ".metadata"]
    return describe_files(folder, [file.name for file in files])


def checkpoints(folder: Path) -> list[Path]:
    """Return the complete checkpoints of a folder, oldest first."""
    found = (
        path for path in folder.glob("iteration-*") if re.fullmatch(r"iteration-\d+", path.name)
    )
    # As numbers: the millionth is after the 999,999th
    return sorted(found, key=lambda path: natural(path.name))


def check_room(needed: float, what: str, processes: ProcessGroup = ALONE) -> None:
    """Check that the current folder's disk has `needed` bytes free, before hours of work.

    Collective. UserError if it has less.
    """
    free = shutil.disk_usage(Path.cwd()).free
    lacks = (
        f"{what} needs {_size(needed)}, and the disk of {Path.cwd()} has {_size(free)} free: "
        "make room, or work on another disk"
    )
    if problem := processes.first(lacks if processes.rank == 0 and needed > free else None):
        raise UserError(problem)


def _size(count: float) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"


def last_iteration(folder: Path) -> int:
    """Return the iteration of the newest checkpoint; 0 without any."""
    return max((int(path.name.split("-")[1]) for path in checkpoints(folder)), default=0)


def load_records(path: Path, processes: ProcessGroup = ALONE) -> list[dict]:
    """Return the records of a checkpoint, after checking all its files against the manifest.

    Collective. UserError if it is damaged.
    """
    # Check the files, each process some of them
    problem = None
    try:
        with reading(path / MANIFEST):
            manifest = read_json(path / MANIFEST, of=dict)
            mine = dict(sorted(manifest["files"].items())[processes.rank :: processes.size])
            if not {RECORDS, ".metadata"} <= manifest["files"].keys():
                raise UserError(f"{MANIFEST} lists no records")
            if wrong := damages(path, mine):
                problem = complaint(path, f"is damaged ({wrong[0]})")
    except UserError as error:
        problem = complaint(path, f"is damaged (no readable {MANIFEST})")
        if isinstance(error.__cause__, PermissionError):  # it may well be whole
            problem = str(error)
    if problem := processes.first(problem):
        raise UserError(problem)
    records = read_json(path / RECORDS, list)
    if not records or not all(
        isinstance(record, dict) and "iteration" in record for record in records
    ):
        raise UserError(complaint(path / RECORDS, "holds no records of iterations"))
    return records


def load_state(path: Path, state: dict, processes: ProcessGroup = ALONE) -> None:
    """Fill the tensors of `state` in place, each process its part. Collective.

    Any number of processes may have written them. UserError if the checkpoint's index is a pickle
    of anything else than an index, which torch would run.
    """
    with reading(path), (path / ".metadata").open("rb") as index:
        _IndexUnpickler(index).load()
        dcp.load(state, checkpoint_id=path, no_dist=processes.size == 1)


class _IndexUnpickler(pickle.Unpickler):
    """Loads a checkpoint's index, `.metadata`, which may only name INDEX and torch's dtypes."""

    def find_class(self, module: str, name: str) -> object:
        if (module, name) == ("builtins", "getattr"):  # how Python 3.11.0 to 3.11.3 write enums
            return lambda kind, name: (
                MEMBERS.get((kind, name)) or self.find_class("builtins.getattr", name)
            )
        if name in INDEX.get(module, ()) or (
            module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        ):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(
            f"its index names {module}.{name}, which no checkpoint holds, so it is not read"
        )


def discard(folder: Path) -> None:
    """Remove a folder; if this is interrupted, what is left has no final name."""
    if folder.exists():
        gone = folder.with_name(f"{folder.name}.gone")
        shutil.rmtree(gone, ignore_errors=True)
        folder.rename(gone)
        shutil.rmtree(gone)


def find_finished(folder: Path, processes: ProcessGroup = ALONE) -> list[dict] | None:
    """Return the records of a finished run whose weights in `out` are as they were written.

    Collective. None if the run is not finished; or if a file is damaged, which is printed: it goes
    on from its last checkpoint, which stays until DVC has the run.
    """
    about = None
    if processes.rank == 0:
        # What is made of the records comes later
        about = find_whole(folder / FINISHED, folder / "out", (TRAINING_RECORDS, HELDOUT_CURVE))
    return processes.gather(about["records"] if about else None)[0]


def release(folder: Path) -> None:
    """Remove a finished run's folder, all but its last checkpoint if that is to be kept.

    A longer run can go on from that (`scratch`).
    """
    finished = attempt(lambda: read_sealed(folder / FINISHED)["about"])[0]
    if checkpoints(folder) and (not finished or finished["keep"]):
        for earlier in folder.parent.glob(f"*{KEPT}"):
            discard(earlier)
        (folder / FINISHED).unlink(missing_ok=True)
        discard(folder / "out")
        folder.rename(folder.with_name(f"{folder.name}{KEPT}"))
    else:
        discard(folder)


def forget_finished(name: str, run: Path, processes: ProcessGroup) -> None:
    """Remove what a finished training left in scratch until DVC knew it.

    DVC does once it starts what comes after. run: the folder that DVC knows; what another training
    left under the same name stays.
    """
    if "DVC_STAGE" in os.environ and processes.rank == 0:
        for done in sorted((ROOT / "train" / name).glob(f"*/{FINISHED}")):
            records = done.parent / "out" / TRAINING_RECORDS
            if not records.exists() or filecmp.cmp(records, run / TRAINING_RECORDS, shallow=False):
                release(done.parent)


def publish(folder: Path, output: Path) -> None:
    """Make a folder built in scratch the output, in one rename if both are on one disk.

    The files also stay in scratch (as hard links), for a process that is killed before everything
    is finished. UserError if what is there cannot be removed.
    """
    temporary = folder.with_name(f"{folder.name}.published")
    shutil.rmtree(temporary, ignore_errors=True)
    shutil.copytree(folder, temporary, copy_function=link)
    replace(temporary, output)


def replace(folder: Path, output: Path) -> None:
    """Move a folder to `output`, or to where its symlink leads, and replace what is already there.

    The old one is renamed aside before: UserError, and nothing has changed, if that cannot be done.
    """
    output, near = output.resolve(), folder
    output.parent.mkdir(parents=True, exist_ok=True)
    if folder.stat().st_dev != output.parent.stat().st_dev:
        near = output.with_name(f".{output.name}.new")
        shutil.rmtree(near, ignore_errors=True)
        shutil.copytree(folder, near)
    old = near.with_name(f".{output.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    try:
        if output.exists():
            output.rename(old)
    except OSError as error:
        raise UserError(
            f"{output}: cannot be replaced ({error.strerror}): remove it, "
            "and run the same command again"
        ) from None
    near.rename(output)
    shutil.rmtree(old, ignore_errors=True)
    shutil.rmtree(folder, ignore_errors=True)
