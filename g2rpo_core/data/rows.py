"""Reads the rows of prompt files, whatever their encoding, delimiter and names of columns."""

import codecs
import csv
import io
import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from g2rpo_core.data import FORMATS
from g2rpo_core.foundation.errors import UserError
from g2rpo_core.foundation.files import complaint, in_one_line, reading
from g2rpo_core.foundation.tables import read_table
from g2rpo_core.foundation.texts import normalized, unprintable, unseen, visible

MISSING: Any = object()  # a field that a row of a csv does not have
# Names of columns, whatever their case: our own first, then those of published data sets
COLUMNS = {
    "prompt": ("prompt", "prompts", "caption", "captions", "text", "texts"),
    "file": ("file", "file_name", "filename"),
    "style": ("style", "styles"),
}
DELIMITERS = (",", ";", "\t")  # of a csv: a spreadsheet writes that of its country
ENCODINGS = (  # by the mark at the beginning; that of UTF-16 begins as that of UTF-32 does
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)


def read_rows(
    path: Path,
    unusable: list[str] | None = None,
    accepted: Mapping[str, Sequence[str]] = COLUMNS,
    needed: Sequence[str] = ("prompt",),
) -> dict[int, dict]:
    """Read the rows of a prompt file by their number, from 1.

    Each has a `prompt` that is text or missing, and perhaps `file` and `style`. The columns may
    have other names (accepted); ours wins over another one. unusable: takes the prompts that no
    encoder takes, with a control character or without a character that is seen, in place of an
    error: nobody can mend them in a data set. needed: our names of the columns that must be there.

    UserError, naming the file, the rows (several, see `in_one_line`) and what to do, for a missing
    or unreadable file, an unknown format, missing columns (all of them), two columns that could be
    the same, and a row whose prompt is not text or not visible.
    """
    # Format and file
    if path.suffix not in FORMATS:
        raise UserError(
            f"{path}: prompts are read from {', '.join(FORMATS)}, "
            f"not from {path.suffix or 'a file without ending'}"
        )
    if not path.exists():
        raise UserError(f"{path}: no such prompt file; give an existing one")
    with reading(path, "give another file of prompts"):
        rows = _rows(path)
    # Columns and rows: all that is wrong, in one line
    names = list(rows[min(rows)]) if rows and isinstance(rows[min(rows)], dict) else []
    columns = {own: found for own in accepted if (found := _column(path, own, names, accepted))}
    if names and not columns.keys() >= set(needed):
        lacking = " and no ".join(
            f"column `{own}` (or {', '.join(accepted[own][1:])})"
            for own in needed
            if own not in columns
        )
        raise UserError(
            f"{path}: has no {lacking}, only {', '.join(visible(name)[:40] for name in names[:12])}"
        )
    rows = {number: _renamed(row, columns) for number, row in rows.items()}
    if unusable is not None:
        unusable += [row["prompt"] for row in rows.values() if _is_unusable(row)]
        rows = {number: row for number, row in rows.items() if not _is_unusable(row)}
    if wrong := [
        f"row {number} {problem}" for number, row in rows.items() if (problem := _problem(row))
    ]:
        raise UserError(complaint(path, f"{in_one_line(wrong)}: each needs a text in `prompt`"))
    return rows


def _column(
    path: Path, own: str, names: Sequence[object], accepted: Mapping[str, Sequence[str]]
) -> object | None:
    """Return the column that is our `prompt`, `file` or `style`; None, or UserError for two."""
    if own in names:
        return own
    found = [
        name for name in names if isinstance(name, str) and name.strip().casefold() in accepted[own]
    ]
    if len(found) > 1:
        could = " and ".join(f"`{visible(name)[:40]}`" for name in found)
        raise UserError(
            f"{path}: the columns {could} could both be the {own}: name the right one `{own}`"
        )
    return found[0] if found else None


def _renamed(row: object, columns: dict[str, object]) -> object:
    """Return a row with our names of its columns."""
    ours = {name: own for own, name in columns.items()}
    return (
        {ours.get(name, name): value for name, value in row.items()}
        if isinstance(row, dict)
        else row
    )


def _is_unusable(row: object) -> bool:
    """Say whether a row's prompt is a text that no encoder takes."""
    prompt = row.get("prompt") if isinstance(row, dict) else None
    if not isinstance(prompt, str) or not prompt.strip():
        return False
    return unseen(prompt) or unprintable(normalized(prompt)) is not None


def _problem(row: object) -> str | None:
    """Describe what is wrong with a row; None if nothing is. An empty prompt is fine."""
    if isinstance(row, ValueError):
        return f"cannot be read ({row})"
    if not isinstance(row, dict):
        return f"is {_kind(row)}, not an object with a `prompt`"
    # csv's reader puts values beyond the last column under None
    if None in row:
        return "has more columns than the first line (put quotes around a text with a comma)"
    if any(value is MISSING for value in row.values()):
        return "has fewer columns than the first line"
    if "prompt" not in row:
        return "has no prompt"
    prompt = row["prompt"]
    # a missing value, as pandas has it
    if prompt is None or prompt is pd.NA or (isinstance(prompt, float) and math.isnan(prompt)):
        return None
    if not isinstance(prompt, str):
        return f"has {_kind(prompt)} as its prompt"
    if "\0" in prompt:
        return (
            "has a NUL character (text without a byte order mark is read as UTF-8: is this UTF-16?)"
        )
    if control := unprintable(normalized(prompt)):
        return f"has the control character {control!a}"
    if prompt.strip() and unseen(prompt):
        return f"has no character that is seen ({prompt[:12]!a})"
    style = row.get("style")
    if isinstance(style, str) and (control := unprintable(normalized(style))):
        return f"has the control character {control!a} in its style"
    return f"has {_kind(style)} as its style" if isinstance(style, dict | list) else None


def _kind(value: object) -> str:
    kinds = {
        dict: "an object",
        list: "a list",
        str: "a text",
        bool: "true or false",
        type(None): "null",
    }
    kinds |= {int: "a number", float: "a number"}
    return kinds.get(type(value), f"a {type(value).__name__}")


def read_marked(path: Path) -> str:
    """Return the text of a file by its byte order mark, by default UTF-8; line ends stay."""
    data = path.read_bytes()
    encoding = next((encoding for mark, encoding in ENCODINGS if data.startswith(mark)), "utf-8")
    return data.decode(encoding)


def _rows(path: Path) -> dict[int, Any]:
    """Read the rows by number, from 1; for JSON lines, by line, and a ValueError for a bad line."""
    if path.suffix == ".parquet":
        return dict(enumerate(read_table(path).to_dict("records"), 1))
    file = io.StringIO(read_marked(path), newline="")
    if path.suffix == ".txt":
        return {number: {"prompt": line} for number, line in enumerate(file, 1)}
    if path.suffix == ".csv":
        return _rows_of_csv(path, file)
    if path.suffix == ".json":
        rows = json.load(file)
        if not isinstance(rows, list):
            raise ValueError("must be a list of texts, or of objects with a `prompt`")
        return {
            number: {"prompt": row} if isinstance(row, str) else row
            for number, row in enumerate(rows, 1)
        }
    return {number: _json_row(line) for number, line in enumerate(file, 1) if line.strip()}


def _rows_of_csv(path: Path, file: io.StringIO) -> dict[int, Any]:
    """Read a csv from its first line that is not blank.

    The delimiter is one by which that line has a column that we know.
    """
    # 128 KiB by default; the text encoders' limit is checked later
    csv.field_size_limit(2**30)
    start, known = 0, {name for names in COLUMNS.values() for name in names}
    delimiters: tuple[str, ...] = DELIMITERS
    while line := file.readline():
        if said := re.fullmatch(r"sep=(.)\s*", line):  # as Excel writes it
            delimiters = (said[1],)
        elif line.strip(" \t\r\n,;"):
            break
        start = file.tell()
    columns = lambda delimiter: {
        cell.strip().casefold() for cell in next(csv.reader([line], delimiter=delimiter), [])
    }
    delimiter = next((each for each in delimiters if columns(each) & known), delimiters[0])
    file.seek(start)
    names = next(csv.reader(file, delimiter=delimiter, strict=True), [])
    if twice := [name for name in names if name and names.count(name) > 1]:
        raise UserError(
            f"{path}: has two columns `{visible(twice[0])[:40]}`: name one of them otherwise"
        )
    file.seek(start)
    return dict(
        enumerate(csv.DictReader(file, restval=MISSING, strict=True, delimiter=delimiter), 1)
    )


def _json_row(line: str) -> object:
    def different(pairs: list[tuple[str, object]]) -> dict:
        if len(dict(pairs)) < len(pairs):
            raise ValueError("a key appears twice")
        return dict(pairs)

    try:
        return json.loads(line, object_pairs_hook=different)
    except ValueError as error:
        if isinstance(error, json.JSONDecodeError):
            return ValueError(f"not JSON: {error.msg} at character {error.pos + 1}")
        return error
    except RecursionError:
        return ValueError("is nested too deeply")
