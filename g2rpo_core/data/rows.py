"""Read the rows of prompt files: UTF-8 text, or Parquet, with one line of names above a csv."""

import io
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from g2rpo_core.data import FORMATS
from g2rpo_core.foundation.errors import UserError
from g2rpo_core.foundation.files import complaint, in_one_line, reading
from g2rpo_core.foundation.tables import read_table
from g2rpo_core.foundation.texts import normalized, unprintable, unseen, visible

# Names of columns, whatever their case: our own first, then those of published data sets
COLUMNS = {
    "prompt": ("prompt", "prompts", "caption", "captions", "text", "texts"),
    "file": ("file", "file_name", "filename"),
    "style": ("style", "styles"),
}
# Columns that say more of an image than the prompt, by their names or by the files they name
MORE = re.compile(
    r"(.*(image|img|picture|photo|video|media|audio|mask|frame)s?|(neg|negative|instruction)s?"
    r"|(neg|negative|edit(ed|ing)?)[ _-]?(prompt|caption|text|instruction)s?)"
    r"([ _-]?(path|url|uri|file|name|byte|list|data|b64|base64|\d)s?)*"
)
MEDIUM = re.compile(r"\.(png|jpe?g|webp|gif|bmp|tiff?|avif|mp4|webm|mov|mkv|wav|mp3|npy)['\]]*$")
DELIMITERS = (",", ";", "\t")  # of a csv: a spreadsheet writes that of its country


def read_rows(
    path: Path,
    unusable: list[str] | None = None,
    accepted: Mapping[str, Sequence[str]] = COLUMNS,
    needed: Sequence[str] = ("prompt",),
) -> dict[int, dict]:
    """Read the rows of a prompt file by their number, from 1.

    Each has a `prompt` that is text, perhaps an empty one, and perhaps `file` and `style`. The
    columns may have other names (accepted); ours wins over another one. unusable: takes the prompts
    that no encoder takes, with a control character or without a character that is seen, in place of
    an error: nobody can mend them in a data set. needed: our names of the columns that must be
    there.

    UserError, naming the file, the rows (several, see `in_one_line`) and what to do, for a missing
    or unreadable file, an unknown format, missing columns, two columns that could be the same, and
    a row whose prompt is not text or not visible.
    """
    if path.suffix not in FORMATS:
        raise UserError(
            f"{path}: prompts are read from {', '.join(FORMATS)}, "
            f"not from {path.suffix or 'a file without ending'}"
        )
    if not path.exists():
        raise UserError(f"{path}: no such prompt file; give an existing one")
    with reading(
        path, "save it as UTF-8, in a csv with quotes around a text with a comma, or give another"
    ):
        rows = dict(enumerate(_rows(path), 1))
    if wrong := [f"row {number}" for number, row in rows.items() if not isinstance(row, dict)]:
        raise UserError(complaint(path, f"{in_one_line(wrong)}: is no object with a `prompt`"))
    ours = _our_names(path, [str(name) for name in next(iter(rows.values()), {})], accepted, needed)
    rows = {n: {ours.get(name, name): row[name] for name in row} for n, row in rows.items()}
    bad = {number: problem for number, row in rows.items() if (problem := _problem(row))}
    if unusable is not None:
        dropped = [number for number in bad if isinstance(rows[number].get("prompt"), str)]
        unusable += [rows[number]["prompt"] for number in dropped]
        rows = {number: row for number, row in rows.items() if number not in dropped}
        bad = {number: problem for number, problem in bad.items() if number in rows}
    if bad:
        wrong = [f"row {number} {problem}" for number, problem in bad.items()]
        raise UserError(complaint(path, f"{in_one_line(wrong)}: each needs a text in `prompt`"))
    return rows


def _rows(path: Path) -> Iterator[Any]:
    """Yield the rows of a file as they stand there; blank lines of a txt are rows."""
    if path.suffix == ".parquet":
        yield from read_table(path).to_dict("records")
        return
    text = path.read_text(encoding="utf-8-sig")
    if path.suffix == ".txt":
        yield from ({"prompt": line} for line in io.StringIO(text))
    elif path.suffix == ".jsonl":
        for number, line in enumerate(filter(str.strip, text.split("\n")), 1):
            try:
                yield json.loads(line)
            except (ValueError, RecursionError) as error:
                raise ValueError(f"row {number}: {error}") from None
    elif path.suffix == ".json":
        if not isinstance(rows := json.loads(text), list):
            raise ValueError("must be a list of texts, or of objects with a `prompt`")
        yield from ({"prompt": row} if isinstance(row, str) else row for row in rows)
    else:
        first, known = text.partition("\n")[0], set().union(*COLUMNS.values())
        cells = lambda by: {cell.strip('" \r').casefold() for cell in first.split(by)}
        delimiter = next((each for each in DELIMITERS if cells(each) & known), ",")
        # The names as a row, or pandas takes a column too many for an index
        options: dict[str, Any] = {"header": None, "dtype": str, "keep_default_na": False}
        names, *rows = pd.read_csv(io.StringIO(text), sep=delimiter, **options).values.tolist()
        if len(set(names)) < len(names):
            raise ValueError("two columns have the same name")
        yield from (dict(zip(names, row)) for row in rows)


def _our_names(
    path: Path,
    names: Sequence[str],
    accepted: Mapping[str, Sequence[str]],
    needed: Sequence[str],
) -> dict[str, str]:
    """Return a file's names of columns -> ours; UserError if one is lacking or could be two."""
    ours: dict[str, str] = {}
    for own, others in accepted.items():
        found = [own] if own in names else [n for n in names if n.strip().casefold() in others]
        if len(found) > 1:
            could = " and ".join(f"`{visible(name)[:40]}`" for name in found)
            raise UserError(
                f"{path}: the columns {could} could both be the {own}: name the right one `{own}`"
            )
        if names and own in needed and not found:
            has = ", ".join(visible(name)[:40] for name in names[:12])
            raise UserError(
                f"{path}: has no column `{own}` (or {', '.join(others[1:])}), only {has}"
            )
        ours |= dict.fromkeys(found, own)
    return ours


def unused(rows: Iterable[Mapping[str, object]]) -> list[str]:
    """Return the columns of `read_rows` that say that a row is more than its prompt."""
    return list(
        dict.fromkeys(
            str(name)
            for row in rows
            for name, value in row.items()
            if name not in COLUMNS
            and hasattr(value, "__len__")
            and len(value)
            and (
                MORE.fullmatch(str(name).strip().casefold())
                or isinstance(value, str | list)
                and MEDIUM.search(str(value).casefold())
            )
        )
    )


def _problem(row: Mapping[str, object]) -> str | None:
    """Say what is wrong with a row; None if nothing is. An empty prompt is fine."""
    prompt = row.get("prompt", 0)
    missing = prompt is None or prompt is pd.NA
    if missing or (isinstance(prompt, float) and math.isnan(prompt)):
        return None
    if not isinstance(prompt, str):
        return f"has {visible(prompt)[:40]} as its prompt" if "prompt" in row else "has no prompt"
    for text in (prompt, row.get("style")):
        if isinstance(text, str) and (control := unprintable(normalized(text))):
            return f"has the control character {control!a}"
    if prompt.strip() and unseen(prompt):
        return f"has no character that is seen ({prompt[:12]!a})"
    return None
