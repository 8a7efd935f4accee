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
from fnmatch import fnmatchcase
from glob import escape
from pathlib import Path
from typing import Any

import psutil
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError
from ruamel.yaml.nodes import MappingNode

from g2rpo_core.foundation.errors import UserError
from g2rpo_core.foundation.layout import hint_for
from g2rpo_core.foundation.permissions import who_may
from g2rpo_core.foundation.texts import reason, steering, visible

MANY = 12  # complaints in one line
MOST_VALUES = 100_000  # in a YAML file; repeats by anchors count each time
DEEPEST = 50  # nested mappings and lists
LARGEST = 2**64  # whole numbers are less, as seeds are
LONGEST = 300  # characters of a library's own message
# What editors, file managers and file systems leave beside files, as in .dvcignore: no content
LEFT = (
    *("#*#", ".#*", "*~", "*.swp", "*.swo", ".*.sw[a-n]", "*.kate-swp", "*___jb_???___"),
    *(".DS_Store", "._*", "Thumbs.db", "desktop.ini", ".directory", ".~lock.*#"),
    *(".goutputstream-*", ".nfs*", ".fuse_hidden*", ".ipynb_checkpoints"),
)


def existing(path: Path) -> Path:
    """Return `path` if there is such a file or folder; UserError with what makes it otherwise."""
    if not path.exists():
        raise UserError(complaint(path, "does not exist"))
    return path


def files_in(folder: Path) -> list[str]:
    """Return the path within `folder` of each file below it, sorted, but of those in `LEFT`."""
    names = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    left = lambda name: any(fnmatchcase(part, each) for part in name.parts for each in LEFT)
    return sorted(name.as_posix() for name in names if not left(name))


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
NO_MEMORY = ((errno.ENOMEM,), ("MemoryError", "can't allocate memory", "out of memory"))
NOT_ALLOWED = (
    (errno.EROFS, errno.EACCES, errno.EPERM),
    ("Read-only file system", "Permission denied"),
)


def is_full(error: BaseException | None) -> bool:
    """Say whether an error or its cause means that a disk or a quota is full."""
    return _means(error, *FULL)


def _means(error: BaseException | None, numbers: Sequence[int], words: Sequence[str]) -> bool:
    """Say whether an error or its cause has one of these numbers, or words in its name or text."""
    while error is not None:
        text = f"{type(error).__name__}: {error}"
        if getattr(error, "errno", None) in numbers or any(word in text for word in words):
            return True
        error = error.__cause__ or error.__context__
    return False


def what_lacks(error: BaseException, then: str = "") -> str | None:
    """Return in one line what this machine lacks and what to do, if an error means that; or None.

    then: what else is to be said of a full disk, such as that the same command goes on.
    """
    where = getattr(error, "filename", None) or Path.cwd()
    lines = (
        (FULL, f"{where}: the disk is full; {then or 'make room, and run the same command again'}"),
        (
            NO_FILES,
            (
                "too many open files: allow more with `ulimit -n 4096`, "
                "and run the same command again; no file is damaged"
            ),
        ),
        (
            NO_MEMORY,
            (
                "there is not enough memory: ask for less at once (images, group, batch), "
                "or take a larger machine"
            ),
        ),
        (
            NOT_ALLOWED if isinstance(error, OSError) else ((), ()),
            (
                f"{where}: cannot be written or read ({getattr(error, 'strerror', None)}): "
                "it must be a place that you may write to"
            ),
        ),
    )
    return next((line for what, line in lines if _means(error, *what)), None)


def complaint(path: Path | str, reason: str, hint: str | None = None) -> str:
    """Return one line: the file, what is wrong with it, what to do (by default, make it again)."""
    return "; ".join(filter(None, (f"{path}: {reason}", hint_for(path) if hint is None else hint)))


def _reason(error: BaseException) -> str:
    if isinstance(error, UnicodeDecodeError):
        return f"is not UTF-8 (byte {error.object[error.start]:#04x} at {error.start})"
    if isinstance(error, FileNotFoundError):
        inside = f" ({Path(error.filename).name})" if error.filename else ""
        return f"does not exist{inside}"
    if isinstance(error, OSError) and error.strerror:
        return f"cannot be read ({error.strerror})"
    text = " ".join(str(error).split()) or type(error).__name__
    if "Traceback (most recent call last)" in text:  # torch's, of all processes
        text = reason(str(error))
    return f"cannot be read: it is damaged or not what its name says ({text[:LONGEST]})"


def whole(path: Path) -> Path:
    """Return `path`, a file that is not empty; UserError if it is a folder, empty or missing."""
    with reading(path), path.open("rb") as file:
        if not file.read(1):
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

    It names up to MANY, see `complaints`. The parser is that of DVC 3.67 (dvc.utils.serialize),
    libyaml by ruamel.yaml: what DVC would refuse later ends here, and both have equal values.
    """
    return parsed_yaml(read_text(path), path)


def read_yaml_with_lines(path: Path) -> tuple[Any, dict[str, int]]:
    """Return the same and the line of each leaf by its dotted key.

    By the parser of ruamel.yaml, which takes "a:b" without quotes between braces: a profile, of
    which DVC reads no value.
    """
    text = read_text(path)
    data = parsed_yaml(text, path, pure=True)
    node = YAML(typ="safe", pure=True).compose(text)
    return data, dict(_lines(node)) if isinstance(data, dict) else {}


def parsed_yaml(text: str, path: Path, pure: bool = False) -> Any:
    """Return the same from a file's text; pure: by which parser."""
    try:
        data = YAML(typ="safe", pure=pure).load(text)
    # The last ones are of values, such as a date of month 13
    except (
        *(YAMLError, RecursionError),
        *(ValueError, TypeError, AttributeError, LookupError, AssertionError),
    ) as error:
        what = " ".join(str(error).replace('in "<unicode string>", ', "in ").split())
        quotes = " (put a text with : or ? in quotes)" if "expected" in what else ""
        raise UserError(complaint(path, f"not YAML: {what[:LONGEST]}{quotes}")) from None
    if problems := complaints(data):
        raise UserError(complaint(path, in_one_line(problems)))
    return data


def in_one_line(problems: Sequence[str]) -> str:
    """Join up to MANY problems, and give the number of the others."""
    more = f"; and {len(problems) - MANY} more" if len(problems) > MANY else ""
    return "; ".join(problems[:MANY]) + more


def complaints(data: Any) -> list[str]:
    """List everything in YAML data that is not plain.

    That is: keys that are not text, dates, sets and bytes, numbers that are not finite or too
    large, control characters, and more or deeper values than any settings have, as of a value that
    contains itself.
    """
    found: list[str] = []
    todo: list[tuple[str, int, Any]] = [("", 0, data)]
    for key, depth, value in todo:  # which grows meanwhile
        where = shown(key) or "the file"
        if problem := _not_plain(value):
            found.append(f"{where}: {problem}")
        if len(todo) > MOST_VALUES:
            return [*found, f"holds more than {MOST_VALUES:,} values"]
        if depth == DEEPEST and isinstance(value, dict | list) and value:
            found.append(f"{where}: is nested too deeply (more than {DEEPEST} levels)")
        elif isinstance(value, list):
            todo += [(f"{key}.{index}", depth + 1, inner) for index, inner in enumerate(value)]
        elif isinstance(value, dict):
            wrong = {part: _no_key(part) for part in value}
            found += [
                f"{where}: the key {shown(part)} {what}" for part, what in wrong.items() if what
            ]
            todo += [
                (f"{key}.{part}" if key else part, depth + 1, inner)
                for part, inner in value.items()
                if not wrong[part]
            ]
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


def _lines(node: MappingNode, prefix: str = "") -> Iterator[tuple[str, int]]:
    """Yield the dotted key of each leaf, and its line; of a merged mapping, where that is."""
    for key, value in node.value:
        name = prefix if key.value == "<<" else f"{prefix}{key.value}."
        if isinstance(value, MappingNode) and value.value:
            yield from _lines(value, name)
        else:
            yield name.removesuffix("."), key.start_mark.line + 1
