"""Reads files: the one place that turns what is wrong with a file into a one-line error.

Every reader raises a UserError with the file, what is wrong with it, and `again`: how to make it again. Nothing is repaired
silently.
"""

import errno
import json
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError

from g2rpo_core.errors import UserError
from g2rpo_core.texts import steering, visible

if TYPE_CHECKING:
    import pandas as pd

MANY = 12  # complaints in one line
MOST_VALUES = 100_000  # in a YAML file; repeats by anchors count each time
DEEPEST = 50  # nested mappings and lists
LARGEST = 2**64  # whole numbers are less, as seeds are
LONGEST = 300  # characters of a library's own message


def remade_by(stage: str, repro: str = "dvc repro") -> str:
    """What to do about a file that a stage of the pipeline makes."""
    return f"the stage `{stage}` makes it again: {repro} {stage}"


@contextmanager
def reading(path: Path, again: str = "") -> Iterator[None]:
    """Turns every error in the block into a UserError about reading `path`; a UserError passes unchanged.

    The libraries that parse files raise almost anything on a damaged one (KeyError, struct.error, RuntimeError, Arrow's and
    Rust's own), so the block must do nothing but read.
    """
    try:
        yield
    except (UserError, ImportError):
        raise
    except Exception as error:
        if type(error).__name__ == "OutOfMemoryError":  # torch's: nothing is wrong with the file
            raise
        raise UserError(complaint(path, _reason(error), again)) from error


def is_full(error: BaseException | None) -> bool:
    """Whether an error or its cause means that a disk or a quota is full.

    Libraries in other languages say so only in their message.
    """
    while error is not None:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            return True
        if any(
            words in str(error) for words in ("No space left on device", "os error 28", "Disk quota exceeded", "File too large")
        ):
            return True
        error = error.__cause__ or error.__context__
    return False


def complaint(path: Path | str, reason: str, again: str = "") -> str:
    """One line: the file, what is wrong with it, and what to do."""
    return f"{path}: {reason}{'; ' if again else ''}{again}"


def _reason(error: Exception) -> str:
    if isinstance(error, UnicodeDecodeError):
        return f"is not UTF-8 (byte {error.object[error.start] if error.start < len(error.object) else 0:#04x} at {error.start})"
    if isinstance(error, FileNotFoundError):
        inside = f" ({Path(error.filename).name})" if error.filename else ""
        return f"does not exist{inside}"
    if isinstance(error, IsADirectoryError):
        return "is a folder, not a file"
    if isinstance(error, RecursionError):
        return "is nested too deeply"
    if isinstance(error, OSError) and error.errno in (errno.EACCES, errno.EPERM, errno.EIO, errno.ENOTDIR, errno.ELOOP):
        return f"cannot be read ({error.strerror})"
    words = " ".join(str(error).split())[:LONGEST] or type(error).__name__
    return f"cannot be read: it is damaged or not what its name says ({words})"


def whole(path: Path, again: str = "") -> Path:
    """Returns `path`, a file that is not empty; UserError if it is a folder, empty or missing."""
    with reading(path, again):
        if path.is_dir():
            raise IsADirectoryError
        if not path.stat().st_size:
            raise UserError(complaint(path, "is empty", again))
    return path


def read_text(path: Path, again: str = "") -> str:
    """The text of a UTF-8 file."""
    with reading(path, again):
        return path.read_text(encoding="utf-8")


def read_json(path: Path, again: str = "", of: type | None = None) -> Any:
    """The data of a JSON file; of: the required type of the whole, dict or list."""
    text = read_text(whole(path, again), again)
    with reading(path, again):
        data = json.loads(text)
    if of is not None and not isinstance(data, of):
        raise UserError(complaint(path, f"is not a JSON {'object' if of is dict else 'list'}", again))
    return data


def read_table(path: Path, columns: Sequence[str] = (), again: str = "") -> "pd.DataFrame":
    """The table of a Parquet file. It must have these columns, and only they are read; all columns if none are given."""
    import pandas as pd
    import pyarrow.parquet as pq

    whole(path, again)
    with reading(path, again):
        if path.open("rb").read(4) != b"PAR1":  # Arrow only looks at the end
            raise UserError(complaint(path, "is not a Parquet file, or its beginning is damaged", again))
        there = pq.read_schema(path).names
    if lacking := [column for column in columns if column not in there]:
        raise UserError(complaint(path, f"has no column {lacking[0]!r}, only {', '.join(there[:MANY])}", again))
    with reading(path, again):
        pq.read_table(path, columns=list(columns) or None).validate(full=True)  # also that texts are UTF-8
        return pd.read_parquet(path, columns=list(columns) or None)


def read_yaml(path: Path, again: str = "") -> Any:
    """The plain values of a YAML 1.2 file; UserError naming up to MANY values that are not plain data (see `complaints`)."""
    return parsed_yaml(read_text(path, again), path, again)


def read_yaml_with_lines(path: Path, again: str = "") -> tuple[Any, dict[str, int]]:
    """As `read_yaml`, and the line of each leaf by its dotted key."""
    text = read_text(path, again)
    data = parsed_yaml(text, path, again)
    lines: dict[str, int] = {}
    _walk_lines(_parsed(path, text, "rt", again), "", lines)
    return data, lines


def parsed_yaml(text: str, path: Path, again: str = "") -> Any:
    """As `read_yaml`, from a file's text."""
    data = _parsed(path, text, "safe", again)
    if problems := complaints(data):
        raise UserError(complaint(path, in_one_line(problems), again))
    return data


def in_one_line(problems: Sequence[str]) -> str:
    """Up to MANY problems, and the number of the others."""
    more = f"; and {len(problems) - MANY} more" if len(problems) > MANY else ""
    return "; ".join(problems[:MANY]) + more


def _parsed(path: Path, text: str, kind: str, again: str) -> Any:
    try:
        return YAML(typ=kind, pure=True).load(text)
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f" (line {mark.line + 1})" if mark else ""
        what = " ".join(f"{error.context or ''} {error.problem or ''}".split())
        raise UserError(complaint(path, f"not YAML: {what[:LONGEST]}{where}", again)) from None
    except YAMLError as error:
        raise UserError(complaint(path, f"not YAML: {' '.join(str(error).split())[:LONGEST]}", again)) from None
    except RecursionError:
        raise UserError(complaint(path, "not YAML: it is nested too deeply", again)) from None
    except (ValueError, TypeError, AttributeError, LookupError, AssertionError) as error:  # of values, such as a date of month 13
        raise UserError(complaint(path, f"not YAML: {' '.join(str(error).split())[:LONGEST]}", again)) from None


def complaints(data: Any) -> list[str]:
    """Everything in YAML data that is not plain.

    That is: keys that are not text, dates, sets and bytes, numbers that are not finite or too large, control characters, a value
    that contains itself, and more or deeper values than any settings have.
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
    """A key of a file in a message: without control characters, and not too long."""
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
        return None if abs(value) < LARGEST else f"must be less than 2**64 (got a number of {len(str(abs(value)))} digits)"
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
