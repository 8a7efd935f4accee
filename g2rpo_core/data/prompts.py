"""Where prompts come from: the shapes task, or the user's own file."""

import csv
import json
import math
import random
import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from g2rpo_core.common.seeding import seed_of
from g2rpo_core.errors import UserError, made_by
from g2rpo_core.shapes.scenes import distinct_scenes

FORMATS = (".txt", ".csv", ".jsonl", ".json", ".parquet")


@dataclass(frozen=True)
class Prompt:
    """id: stable across runs and unique; style: the group it is reported under, may be empty."""

    id: str
    text: str
    style: str


def shape_prompts(count: int, seed: int, *, testing: bool) -> list[Prompt]:
    """Captions of different scenes; test captions are never among training ones."""
    scenes = distinct_scenes(count, seed_of("prompts", seed, "test" if testing else "train"), testing=testing)
    prefix = "test" if testing else "train"
    return [Prompt(f"{prefix}-{index:05d}", scene.caption, scene.style) for index, scene in enumerate(scenes)]


def read_prompts(path: Path) -> list[Prompt]:
    """Prompts of a file: txt (one a line), json (a list of texts or objects), csv, jsonl or parquet with `prompt` and perhaps `style`.

    Texts are in Unicode's NFC with single spaces. Blank prompts are passed over, and one that came before; ids are the file's name and
    the line or row number. UserError, naming the file, up to three rows and what to do, for a missing, unreadable or empty file, an
    unknown format, a missing column, and a row whose prompt is no text.
    """
    rows = read_rows(path)
    prompts: dict[str, Prompt] = {}
    for number, row in enumerate(rows):
        if text := normalized(row["prompt"] if isinstance(row["prompt"], str) else ""):
            prompts.setdefault(text, Prompt(f"{path.stem}-{number:06d}", text, str(row.get("style") or "")))
    if not prompts:
        raise UserError(f"{path}: holds no prompt; put one on each line")
    return list(prompts.values())


def read_rows(path: Path) -> list[dict]:
    """The rows of a prompt file as they stand there, each with a `prompt` that is a text or missing; UserError as `read_prompts`."""
    if path.suffix not in FORMATS:
        raise UserError(f"{path}: prompts are read from {', '.join(FORMATS)}, not from {path.suffix or 'a file without ending'}")
    try:
        rows = list(_rows(path))
    except FileNotFoundError:
        raise UserError(f"{path}: no such prompt file; give an existing one in the profile's section `prompts`") from None
    except (OSError, ValueError, RecursionError, csv.Error) as error:
        raise UserError(f"{path}: cannot be read as {path.suffix}: {str(error).splitlines()[0]}") from None
    if rows and isinstance(rows[0], dict) and "prompt" not in rows[0]:
        raise UserError(f"{path}: has no column `prompt`, only {', '.join(map(str, rows[0]))}")
    if wrong := [f"row {number} {problem}" for number, row in enumerate(rows, 1) if (problem := _problem(row))]:
        more = f", and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise UserError(f"{path}: {'; '.join(wrong[:3])}{more}: each needs a text in `prompt`")
    return rows


def normalized(text: str) -> str:
    """A prompt's text as it is compared and encoded: Unicode's NFC, single spaces, none around it."""
    return " ".join(unicodedata.normalize("NFC", text).split())


def _problem(row: object) -> str | None:
    """What is wrong with a row; nothing with one whose prompt is empty."""
    if not isinstance(row, dict):
        return f"is {_kind(row)}, not an object with a `prompt`"
    if "prompt" not in row:
        return "has no prompt"
    prompt = row["prompt"]
    if prompt is None or (isinstance(prompt, float) and math.isnan(prompt)):  # a missing value, as pandas has it
        return None
    if not isinstance(prompt, str):
        return f"has {_kind(prompt)} as its prompt"
    return "has a NUL character" if "\0" in prompt else None


def _kind(value: object) -> str:
    return {dict: "an object", list: "a list", str: "a text", bool: "true or false", type(None): "null"}.get(
        type(value), "a number"
    )


def _rows(path: Path) -> Iterable[dict]:
    if path.suffix == ".parquet":
        return pd.read_parquet(path).to_dict("records")
    with path.open(encoding="utf-8-sig", newline="") as file:
        if path.suffix == ".txt":
            return [{"prompt": line} for line in file]
        if path.suffix == ".csv":
            csv.field_size_limit(2**30)  # 128 KiB by default; the text encoders' limit is checked later
            return list(csv.DictReader(file))
        if path.suffix == ".json":
            rows = json.load(file)
            if not isinstance(rows, list):
                raise ValueError("must be a list of texts, or of objects with a `prompt`")
            return [{"prompt": row} if isinstance(row, str) else row for row in rows]
        return [json.loads(line) for line in file if line.strip()]


def held_out(train: list[Prompt], test: list[Prompt]) -> tuple[list[Prompt], int]:
    """The training prompts that are no test prompts, and how many were left out; UserError if none is left."""
    tested = {normalized(prompt.text).casefold() for prompt in test}
    kept = [prompt for prompt in train if normalized(prompt.text).casefold() not in tested]
    if not kept:
        raise UserError(
            f"prompts: all {len(train)} training prompts are test prompts, too: nothing would be held out; give other files"
        )
    return kept, len(train) - len(kept)


def choose(prompts: list[Prompt], count: int, seed: int) -> list[Prompt]:
    """`count` of the prompts in their order, by a seeded draw; all of them if there are fewer."""
    if count >= len(prompts):
        return prompts
    chosen = random.Random(seed_of("choose", seed)).sample(range(len(prompts)), count)
    return [prompts[index] for index in sorted(chosen)]


def prompt_order(iteration: int, per_iteration: int, count: int, seed: int) -> list[int]:
    """Indices of the prompts of one iteration: epoch after epoch, each in its own seeded order; a pure function."""
    positions = range(iteration * per_iteration, (iteration + 1) * per_iteration)
    orders = {epoch: list(range(count)) for epoch in {position // count for position in positions}}
    for epoch, order in orders.items():
        random.Random(seed_of("visits", seed, epoch)).shuffle(order)
    return [orders[position // count][position % count] for position in positions]


def write_prompts(path: Path, prompts: list[Prompt]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pd.DataFrame(prompts, columns=["id", "text", "style"]).rename(columns={"text": "prompt"}).to_parquet(path, index=False)


def load_prompts(path: Path) -> list[Prompt]:
    """The prompts that `write_prompts` wrote."""
    return [Prompt(*row) for row in pd.read_parquet(made_by("prompts", path))[["id", "prompt", "style"]].itertuples(index=False)]
