"""Reads files and writes them whole: here, what is wrong with a file becomes a one-line error.

Every reader raises a UserError with the file, what is wrong with it, and what makes it again
(`hint_for`). Nothing is repaired silently.
"""

import errno
import json
import math
import os
import platform
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import date
from glob import escape
from pathlib import Path
from typing import Any

import psutil
from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError

from g2rpo_core.foundation.errors import UserError
from g2rpo_core.foundation.layout import hint_for
from g2rpo_core.foundation.permissions import who_may
from g2rpo_core.foundation.texts import reason, steering, visible

MANY = 12  # complaints in one line
MOST_VALUES = 100_000  # in a YAML file; repeats by anchors count each time
DEEPEST = 50  # nested mappings and lists
LARGEST = 2**64  # whole numbers are less, as seeds are
LONGEST = 300  # characters of a library's own message


def existing(path: Path) -> Path:
    """Return `path` if there is such a file or folder; UserError with what makes it otherwise."""
    if not path.exists():
        raise UserError(complaint(path, "does not exist"))
    return path


@contextmanager
def reading(path: Path, hint: str | None = None) -> Iterator[None]:
    """Turn every error in the block into a UserError about reading `path`; a UserError passes.

    The libraries that parse files raise almost anything on a damaged one (KeyError, struct.error,
    RuntimeError, Arrow's and Rust's own), so the block must do nothing but read. hint: what to do,
    in place of `hint_for`.
    """
    try:
        yield
    except (UserError, ImportError):
        raise
    except BaseException as error:
        # A CheckpointException of torch is no Exception
        if not isinstance(error, Exception) and type(error).__name__ != "CheckpointException":
            raise
        # Nothing is wrong with the file
        if any(_means(error, *what) for what in (NO_FILES, NO_MEMORY)):
            raise
        # To make it again would not change whose it is
        hint = who_may(error, path) if isinstance(error, PermissionError) else hint
        raise UserError(complaint(path, _reason(error), hint)) from error


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn a failed write in the block into a UserError about `path`, a command's option --out."""
    try:
        yield
    except Exception as error:
        if is_full(error):
            raise UserError(
                f"--out {path}: the disk is full: make room, and run the same command again"
            ) from None
        if not isinstance(error, OSError):
            raise
        raise UserError(
            f"--out {path}: cannot be written ({error.strerror or type(error).__name__})"
        ) from None


# What the machine lacks: the numbers of the system's errors, and the words of libraries in other
# languages, which have no number
FULL = (
    (errno.ENOSPC, errno.EDQUOT, errno.EFBIG),
    (
        "No space left on device",
        "os error 28",
        "Disk quota exceeded",
        "File too large",
        "unexpected pos ",  # torch's writer of zip files, which hides the system's error
    ),
)
NO_FILES = ((errno.EMFILE, errno.ENFILE), ("Too many open files",))
NO_MEMORY = ((errno.ENOMEM,), ("can't allocate memory", "out of memory"))
NOT_ALLOWED = (
    (errno.EROFS, errno.EACCES, errno.EPERM),
    ("Read-only file system", "Permission denied"),
)
MEMORY_ERRORS = ("MemoryError", "OutOfMemoryError", "ArrowMemoryError")


def is_full(error: BaseException | None) -> bool:
    """Say whether an error or its cause means that a disk or a quota is full."""
    return _means(error, *FULL)


def _means(error: BaseException | None, numbers: Sequence[int], words: Sequence[str]) -> bool:
    """Say whether an error or its cause has one of these numbers or words."""
    while error is not None:
        if (
            isinstance(error, OSError)
            and error.errno in numbers
            or any(word in str(error) for word in words)
        ):
            return True
        if numbers is NO_MEMORY[0] and type(error).__name__ in MEMORY_ERRORS:
            return True
        error = error.__cause__ or error.__context__
    return False


def what_lacks(error: BaseException, then: str = "") -> str | None:
    """Return in one line what this machine lacks and what to do, if an error means that; or None.

    then: what else is to be said of a full disk, such as that the same command goes on.
    """
    where = getattr(error, "filename", None) or Path.cwd()
    if is_full(error):
        return f"{where}: the disk is full; {then or 'make room, and run the same command again'}"
    if _means(error, *NO_FILES):
        return (
            "too many open files: allow more with `ulimit -n 4096`, "
            "and run the same command again; no file is damaged"
        )
    if _means(error, *NO_MEMORY):
        return (
            "there is not enough memory: ask for less at once (images, group, batch), "
            "or take a larger machine"
        )
    if isinstance(error, OSError) and _means(error, *NOT_ALLOWED):
        return (
            f"{where}: cannot be written or read ({error.strerror}): "
            "it must be a place that you may write to"
        )
    return None


def complaint(path: Path | str, reason: str, hint: str | None = None) -> str:
    """Return one line: the file, what is wrong with it, what to do (by default, make it again)."""
    return "; ".join(filter(None, (f"{path}: {reason}", hint_for(path) if hint is None else hint)))


def _reason(error: BaseException) -> str:
    if isinstance(error, UnicodeDecodeError):
        byte = error.object[error.start] if error.start < len(error.object) else 0
        return f"is not UTF-8 (byte {byte:#04x} at {error.start})"
    if isinstance(error, FileNotFoundError):
        inside = f" ({Path(error.filename).name})" if error.filename else ""
        return f"does not exist{inside}"
    if isinstance(error, IsADirectoryError):
        return "is a folder, not a file"
    if isinstance(error, RecursionError):
        return "is nested too deeply"
    if isinstance(error, OSError) and error.errno in (
        errno.EACCES,
        errno.EPERM,
        errno.EIO,
        errno.ENOTDIR,
        errno.ELOOP,
    ):
        return f"cannot be read ({error.strerror})"
    text = " ".join(str(error).split()) or type(error).__name__
    if "Traceback (most recent call last)" in text:  # torch's, of all processes
        text = reason(str(error))
    return f"cannot be read: it is damaged or not what its name says ({text[:LONGEST]})"


def whole(path: Path) -> Path:
    """Return `path`, a file that is not empty; UserError if it is a folder, empty or missing."""
    with reading(path):
        if path.is_dir():
            raise IsADirectoryError
        if not path.stat().st_size:
            raise UserError(complaint(path, "is empty"))
    return path


def write_whole(path: Path, data: bytes | str) -> None:
    """Write a file under a temporary name, and rename it once it is on disk; a text as UTF-8.

    An error leaves nothing of it; what a process that was killed here left of it is removed.
    """
    begin = f"{path.name}.{platform.node()}-"
    for left in path.parent.glob(f"{escape(begin)}*.tmp"):
        pid = left.name.removeprefix(begin).removesuffix(".tmp")
        if pid.isdecimal() and not psutil.pid_exists(int(pid)):
            left.unlink(missing_ok=True)
    temporary = path.with_name(f"{begin}{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(data.encode() if isinstance(data, str) else data)
            file.flush()
            os.fsync(file.fileno())
        temporary.rename(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def sync(path: Path) -> None:
    """Wait until a file's content, or the names in a folder, are on the disk.

    After a power cut, too, what is written later never stands without them.
    """
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_json(path: Path, data: object) -> None:
    """Write indented JSON, after making the file's folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps(data, indent=1) + "\n")


def read_text(path: Path) -> str:
    """Return the text of a UTF-8 file."""
    with reading(path):
        return path.read_text(encoding="utf-8")


def read_json(path: Path, of: type | None = None) -> Any:
    """Return the data of a JSON file; of: the required type of the whole, dict or list."""
    text = read_text(whole(path))
    with reading(path):
        data = json.loads(text)
    if of is not None and not isinstance(data, of):
        raise UserError(complaint(path, f"is not a JSON {'object' if of is dict else 'list'}"))
    return data


def read_yaml(path: Path) -> Any:
    """Return the plain values of a YAML 1.2 file; UserError for values that are not plain data.

    It names up to MANY, see `complaints`.
    """
    return parsed_yaml(read_text(path), path)


def read_yaml_with_lines(path: Path) -> tuple[Any, dict[str, int]]:
    """Return the same and the line of each leaf by its dotted key."""
    text = read_text(path)
    data = parsed_yaml(text, path)
    lines: dict[str, int] = {}
    _walk_lines(_parsed(path, text, "rt"), "", lines)
    return data, lines


def parsed_yaml(text: str, path: Path) -> Any:
    """Return the same from a file's text."""
    data = _parsed(path, text, "safe")
    if problems := complaints(data):
        raise UserError(complaint(path, in_one_line(problems)))
    return data


def in_one_line(problems: Sequence[str]) -> str:
    """Join up to MANY problems, and give the number of the others."""
    more = f"; and {len(problems) - MANY} more" if len(problems) > MANY else ""
    return "; ".join(problems[:MANY]) + more


def _parsed(path: Path, text: str, kind: str) -> Any:
    try:
        return YAML(typ=kind, pure=True).load(text)
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f" (line {mark.line + 1})" if mark else ""
        what = " ".join(f"{error.context or ''} {error.problem or ''}".split())
        raise UserError(complaint(path, f"not YAML: {what[:LONGEST]}{where}")) from None
    except YAMLError as error:
        raise UserError(
            complaint(path, f"not YAML: {' '.join(str(error).split())[:LONGEST]}")
        ) from None
    except RecursionError:
        raise UserError(complaint(path, "not YAML: it is nested too deeply")) from None
    # Of values, such as a date of month 13
    except (ValueError, TypeError, AttributeError, LookupError, AssertionError) as error:
        raise UserError(
            complaint(path, f"not YAML: {' '.join(str(error).split())[:LONGEST]}")
        ) from None


def complaints(data: Any) -> list[str]:
    """List everything in YAML data that is not plain.

    That is: keys that are not text, dates, sets and bytes, numbers that are not finite or too
    large, control characters, a value that contains itself, and more or deeper values than any
    settings have.
    """
    found: list[str] = []
    seen = 0
    within: set[int] = set()

    def walk(value: Any, key: str, depth: int) -> None:
        nonlocal seen
        seen += 1
        if seen > MOST_VALUES or depth > DEEPEST:
            return
        problem = _not_plain(value)
        if isinstance(value, dict | list):
            if id(value) in within:
                problem = "contains itself (an anchor in its own value)"
            else:
                within.add(id(value))
                items = value.items() if isinstance(value, dict) else enumerate(value)
                for part, inner in items:
                    name = f"{key}.{part}" if key else str(part)
                    if isinstance(value, dict) and (wrong := _no_key(part)):
                        found.append(f"{shown(key) or 'the file'}: the key {shown(part)} {wrong}")
                    else:
                        walk(inner, name, depth + 1)
                within.discard(id(value))
        if problem:
            found.append(f"{shown(key) or 'the file'}: {problem}")
        if depth == DEEPEST and isinstance(value, dict | list) and value:
            found.append(f"{shown(key)}: is nested too deeply (more than {DEEPEST} levels)")

    walk(data, "", 0)
    if seen > MOST_VALUES:
        found.append(f"holds more than {MOST_VALUES:,} values")
    return found


def shown(value: object) -> str:
    """Return a key of a file for a message: without control characters, and not too long."""
    return visible(str(value)[:80])


def _no_key(key: object) -> str | None:
    if not isinstance(key, str):
        return "is not text: put it in quotes"
    if not key:
        return "is empty"
    return "has a control character" if steering(key) or "\n" in key else None


def _not_plain(value: Any) -> str | None:
    if isinstance(value, str):
        wrong = steering(value)
        return f"has the control character {wrong!a}" if wrong else None
    if isinstance(value, bool) or value is None or isinstance(value, dict | list):
        return None
    if isinstance(value, int):
        return (
            None
            if abs(value) < LARGEST
            else f"must be less than 2**64 (got a number of {len(str(abs(value)))} digits)"
        )
    if isinstance(value, float):
        return None if math.isfinite(value) else f"must be a finite number (got {value})"
    if isinstance(value, date):
        return f"is a date ({value}): put it in quotes"
    return f"is a {type(value).__name__}, but settings are texts, numbers, lists and mappings"


def _walk_lines(node: Any, prefix: str, lines: dict[str, int]) -> None:
    if not hasattr(node, "items"):
        return
    for key, value in node.items():
        name = f"{prefix}.{key}" if prefix else str(key)
        if isinstance(value, dict) and value:
            _walk_lines(value, name, lines)
        else:
            try:
                lines[name] = node.lc.key(key)[0] + 1
            except (KeyError, AttributeError, TypeError):  # of a merge key: the line of the mapping
                lines[name] = (getattr(node, "lc", None) and node.lc.line or 0) + 1
