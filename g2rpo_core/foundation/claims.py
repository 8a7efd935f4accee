"""Reserves what a stage writes by a lock on a file, which ends with the last of its processes."""

import errno
import fcntl
import os
import platform
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from g2rpo_core.foundation.errors import UserError
from g2rpo_core.foundation.texts import echo

# What flock answers on file systems that cannot lock
WITHOUT_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)
# File handles of locks, which the system closes with the process
_held: dict[Path, int] = {}


def lock_of(stage: str, name: str) -> Path:
    """Return the file by which a stage reserves a run, or the folder of a profile."""
    return Path(".cache", "resume", stage, f"{name}.lock").absolute()


def take(stage: str, name: str) -> str:
    """Reserve what a stage writes for this process; return the owner, as the file now has it.

    UserError if another process has it. Others of this process's group may `share` it from now on.
    """
    path, owner = lock_of(stage, name), f"process {os.getpid()} on {platform.node()}"
    path.parent.mkdir(parents=True, exist_ok=True)
    handle = _open(path, os.O_RDWR | os.O_CREAT)
    try:
        _flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.ftruncate(handle, 0)
        os.write(handle, owner.encode())
        _flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(_held.pop(path))
        who = path.read_text(errors="replace").strip() or "another process"
        raise UserError(
            f"{stage} of {name} is already running ({who}): wait until it has ended, or end it; "
            "two at once would damage it"
        ) from None
    return owner


def share(path: Path) -> None:
    """Keep a lock that another process of this group has taken until this one has ended, too."""
    _flock(_open(path, os.O_RDWR), fcntl.LOCK_SH)


@contextmanager
def one_at_a_time(path: Path) -> Iterator[int]:
    """Run the block in one thread or process after the other, by a lock on the file `path`.

    The file is made with its folder; the block gets its handle.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        _flock(handle, fcntl.LOCK_EX)
        yield handle
    finally:
        os.close(handle)


def _open(path: Path, flags: int) -> int:
    if path in _held:  # by an earlier start in this process
        os.close(_held.pop(path))
    return _held.setdefault(path, os.open(path, flags, 0o666))


def _flock(handle: int, how: int) -> None:
    """Lock a file; where the file system has no locks, warn and go on."""
    try:
        fcntl.flock(handle, how)
    except OSError as error:
        if error.errno not in WITHOUT_LOCKS:
            raise
        if how & fcntl.LOCK_EX:
            echo(
                f"warning: the disk of {Path.cwd()} has no locks (flock): "
                "start no run twice at once",
                file=sys.stderr,
            )
