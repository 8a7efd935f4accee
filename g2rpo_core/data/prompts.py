"""Read prompts from a tiny task or a user's file, choose among them, and store them."""

import csv
import io
import json
import math
import random
import re
import unicodedata
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from g2rpo_core.common.seeding import seed_of
from g2rpo_core.data import FORMATS
from g2rpo_core.foundation.errors import UserError
from g2rpo_core.foundation.files import complaint, existing, in_one_line, read_table, reading, write_whole
from g2rpo_core.foundation.texts import unprintable, visible
from g2rpo_core.tasks.table import TASKS

MISSING: Any = object()  # a field that a row of a csv does not have


@dataclass(frozen=True)
class Prompt:
    """A prompt of a run."""

    id: str
    """Unique, and stable across runs."""
    text: str
    style: str
    """The group it is reported under; may be empty."""


def captions(task: str, count: int, seed: int, *, testing: bool, without: Collection[str] = ()) -> list[Prompt]:
    """Draw captions of different scenes of a task, none of `without`; test captions are never training ones. UserError if there are too few."""
    prefix = "test" if testing else "train"
    try:
        scenes = TASKS[task].distinct_scenes(count, seed_of("prompts", seed, prefix), testing=testing, without=without)
    except ValueError as error:
        raise UserError(f"prompts.{prefix}_count: {error}") from None
    return [Prompt(f"{prefix}-{index:05d}", scene.caption, scene.style) for index, scene in enumerate(scenes)]


def read_prompts(path: Path) -> list[Prompt]:
    """Read the prompts of `read_all`, each text once."""
    return distinct(read_all(path))


def distinct(prompts: list[Prompt]) -> list[Prompt]:
    """Keep the first prompt of each text."""
    first: dict[str, Prompt] = {}
    for prompt in prompts:
        first.setdefault(prompt.text, prompt)
    return list(first.values())


def read_all(path: Path) -> list[Prompt]:
    """Read the prompts of a file: txt (one per line), json (list of texts or objects), csv, jsonl or parquet.

    Rows have a `prompt`, and perhaps a `style`. Texts are in Unicode's NFC with single spaces. Blank prompts are skipped; ids are
    the file's name and the line or row number. UserError, naming the file, the rows (several, see `in_one_line`) and what to do,
    for a missing, unreadable or empty file, an unknown format, a missing column, and a row whose prompt is not text.
    """
    prompts: list[Prompt] = []
    for number, row in read_rows(path).items():
        if text := normalized(row["prompt"] if isinstance(row["prompt"], str) else ""):
            prompts.append(Prompt(f"{make_id_prefix(path)}-{number - 1:06d}", text, _style(row.get("style"))))
    if not prompts:
        raise UserError(f"{path}: holds no prompt; put one on each line")
    return prompts


def read_rows(path: Path) -> dict[int, dict]:
    """Read the rows of a prompt file by their number, from 1, each with a `prompt` that is text or missing.

    UserError as in `read_all`.
    """
    # Format and file
    if path.suffix not in FORMATS:
        raise UserError(f"{path}: prompts are read from {', '.join(FORMATS)}, not from {path.suffix or 'a file without ending'}")
    if not path.exists():
        raise UserError(f"{path}: no such prompt file; give an existing one")
    with reading(path, "give another file of prompts"):
        rows = _rows(path)
    # Columns and rows: all that is wrong, in one line
    if rows and isinstance(first := rows[min(rows)], dict) and "prompt" not in first:
        raise UserError(f"{path}: has no column `prompt`, only {', '.join(visible(name)[:40] for name in list(first)[:12])}")
    if wrong := [f"row {number} {problem}" for number, row in rows.items() if (problem := _problem(row))]:
        raise UserError(complaint(path, f"{in_one_line(wrong)}: each needs a text in `prompt`"))
    return rows


def normalized(text: str) -> str:
    """Return a prompt's text as it is compared and encoded: Unicode's NFC, single spaces, none at its ends."""
    return " ".join(unicodedata.normalize("NFC", text).split())


def given_prompts(texts: Sequence[str]) -> list[Prompt]:
    """Return prompts that were typed, by their number from 0000; UserError for one with a character that no encoder takes."""
    prompts = [Prompt(f"{number:04d}", normalized(text), "") for number, text in enumerate(texts)]
    for prompt in prompts:
        if control := unprintable(prompt.text):
            raise UserError(f"prompt {prompt.id} has the character {control!a}: type it as UTF-8")
    return prompts


def make_id_prefix(path: Path) -> str:
    """Return the file's name as the start of ids; ids name images, so characters that are not safe everywhere become `_`."""
    return re.sub(r"[^\w.-]", "_", path.stem)[:100]


def _style(value: object) -> str:
    return "" if value is None or (isinstance(value, float) and math.isnan(value)) else normalized(str(value))


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
        return "has a NUL character"
    if control := unprintable(normalized(prompt)):
        return f"has the control character {control!a}"
    style = row.get("style")
    if isinstance(style, str) and (control := unprintable(normalized(style))):
        return f"has the control character {control!a} in its style"
    return f"has {_kind(style)} as its style" if isinstance(style, dict | list) else None


def _kind(value: object) -> str:
    kinds = {dict: "an object", list: "a list", str: "a text", bool: "true or false", type(None): "null"}
    kinds |= {int: "a number", float: "a number"}
    return kinds.get(type(value), f"a {type(value).__name__}")


def _rows(path: Path) -> dict[int, Any]:
    """Read the rows by number, from 1 (for JSON lines, the line number); for a line that is not JSON, its ValueError."""
    if path.suffix == ".parquet":
        return dict(enumerate(read_table(path).to_dict("records"), 1))
    with path.open(encoding="utf-8-sig", newline="") as file:
        if path.suffix == ".txt":
            return {number: {"prompt": line} for number, line in enumerate(file, 1)}
        if path.suffix == ".csv":
            # 128 KiB by default; the text encoders' limit is checked later
            csv.field_size_limit(2**30)
            return dict(enumerate(csv.DictReader(file, restval=MISSING, strict=True), 1))
        if path.suffix == ".json":
            rows = json.load(file)
            if not isinstance(rows, list):
                raise ValueError("must be a list of texts, or of objects with a `prompt`")
            return {number: {"prompt": row} if isinstance(row, str) else row for number, row in enumerate(rows, 1)}
        return {number: _json_row(line) for number, line in enumerate(file, 1) if line.strip()}


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


def held_out(train: list[Prompt], test: list[Prompt]) -> tuple[list[Prompt], int]:
    """Return the training prompts that are not test prompts, and how many were left out; UserError if none is left."""
    tested = {normalized(prompt.text).casefold() for prompt in test}
    kept = [prompt for prompt in train if normalized(prompt.text).casefold() not in tested]
    if not kept:
        raise UserError(
            f"prompts: all {len(train)} training prompts are also test prompts: nothing would be held out; give other files"
        )
    return kept, len(train) - len(kept)


def choose(prompts: list[Prompt], count: int, seed: int) -> list[Prompt]:
    """Draw `count` of the prompts with a seed, in their order; return all of them if there are fewer."""
    if count >= len(prompts):
        return prompts
    chosen = random.Random(seed_of("choose", seed)).sample(range(len(prompts)), count)
    return [prompts[index] for index in sorted(chosen)]


def prompt_order(iteration: int, per_iteration: int, count: int, seed: int) -> list[int]:
    """Return the indices of the prompts of one iteration: epoch after epoch, each in its own seeded order."""
    positions = range(iteration * per_iteration, (iteration + 1) * per_iteration)
    orders = {epoch: list(range(count)) for epoch in {position // count for position in positions}}
    for epoch, order in orders.items():
        random.Random(seed_of("visits", seed, epoch)).shuffle(order)
    return [orders[position // count][position % count] for position in positions]


def write_prompts(
    path: Path, prompts: list[Prompt], left_out: Mapping[str, int] | None = None, *, data_set: bool = False
) -> None:
    """Write prompts to Parquet.

    left_out: how many were left out, by reason, kept in the file's metadata if any (see `left_out_of`); data_set: whether they are
    from one, also kept (see `of_data_set`).
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    table = pd.DataFrame(prompts, columns=["id", "text", "style"]).rename(columns={"text": "prompt"})
    about = {b"left_out": json.dumps(left_out).encode()} if left_out else {}
    about |= {b"data_set": b"true"} if data_set else {}
    if not about:
        write_whole(path, table.to_parquet(index=False))
        return
    arrow = pa.Table.from_pandas(table, preserve_index=False)
    written = io.BytesIO()
    pq.write_table(arrow.replace_schema_metadata({**(arrow.schema.metadata or {}), **about}), written)
    write_whole(path, written.getvalue())


def of_data_set(path: Path) -> bool:
    """Tell whether the prompts are from a data set, as `write_prompts` recorded it."""
    with reading(path):
        return b"data_set" in (pq.read_schema(path).metadata or {})


def left_out_of(path: Path) -> dict[str, int]:
    """Return how many prompts were left out, by reason, as `write_prompts` recorded it."""
    with reading(path):
        return json.loads((pq.read_schema(path).metadata or {}).get(b"left_out", b"{}"))


def load_prompts(path: Path) -> list[Prompt]:
    """Read the prompts that `write_prompts` wrote."""
    table = read_table(existing(path), ["id", "prompt", "style"])
    if not len(table) or not all(isinstance(value, str) for value in table.to_numpy().ravel()):
        raise UserError(complaint(path, "holds no prompts, or some that are not text"))
    return [Prompt(*row) for row in table.itertuples(index=False)]
