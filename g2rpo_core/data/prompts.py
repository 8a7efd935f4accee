"""Read prompts from a tiny task or a user's file, choose among them, and store them."""

import io
import json
import math
import random
import re
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from g2rpo_core.data.rows import read_rows, unused
from g2rpo_core.foundation.errors import UserError
from g2rpo_core.foundation.files import complaint, existing, in_one_line, reading, write_whole
from g2rpo_core.foundation.tables import TEXT, read_table
from g2rpo_core.foundation.texts import comparable, echo, normalized, unprintable, unseen, visible
from g2rpo_core.sampling.seeding import seed_of
from g2rpo_core.tasks.table import TASKS


@dataclass(frozen=True)
class Prompt:
    """A prompt of a run."""

    id: str
    """Unique, and stable across runs."""
    text: str
    style: str
    """The group it is reported under; may be empty."""


def captions(
    task: str, count: int, seed: int, *, testing: bool, without: Collection[str] = ()
) -> list[Prompt]:
    """Draw captions of different scenes of a task, none of `without`.

    Test captions are never training ones. UserError if there are too few.
    """
    prefix = "test" if testing else "train"
    try:
        scenes = TASKS[task].distinct_scenes(
            count, seed_of("prompts", seed, prefix), testing=testing, without=without
        )
    except ValueError as error:
        raise UserError(f"prompts.{prefix}_count: {error}") from None
    return [
        Prompt(f"{prefix}-{index:05d}", scene.caption, scene.style)
        for index, scene in enumerate(scenes)
    ]


def read_prompts(path: Path) -> list[Prompt]:
    """Read the prompts of `read_all`, each text once."""
    return distinct(read_all(path))


def distinct(prompts: list[Prompt]) -> list[Prompt]:
    """Keep the first prompt of each text; two texts that look alike are one (`comparable`)."""
    first: dict[str, Prompt] = {}
    for prompt in prompts:
        first.setdefault(comparable(prompt.text), prompt)
    return list(first.values())


def read_all(path: Path, unusable: list[str] | None = None) -> list[Prompt]:
    """Read the prompts of a file: txt (one per line), json (list), csv, jsonl or parquet.

    A json list holds texts or objects. Rows have a `prompt`, and perhaps a `style`, as `read_rows`
    finds them. Texts are in Unicode's NFC with single spaces. Blank prompts are skipped; ids are
    the file's name and the line or row number. A line tells columns that say more. UserError as of
    `read_rows`, and for a file without a prompt; unusable: as there.
    """
    prompts: list[Prompt] = []
    rows = read_rows(path, unusable)
    # Ids name images, and some characters are not safe everywhere
    prefix = re.sub(r"[^\w.-]", "_", path.stem)[:100]
    for number, row in rows.items():
        if text := normalized(row["prompt"] if isinstance(row["prompt"], str) else ""):
            prompts.append(Prompt(f"{prefix}-{number - 1:06d}", text, _style(row.get("style"))))
    if not prompts:
        raise UserError(f"{path}: holds no prompt; put one on each line")
    if columns := unused(rows.values()):
        repeated = len(prompts) - len(distinct(prompts))
        also = f"; {repeated} of {len(prompts)} rows repeat a prompt" if repeated else ""
        echo(
            f"warning: {path}: only its prompts are used, not its columns "
            f"{', '.join(columns)}{also}",
            file=sys.stderr,
        )
    return prompts


def given_prompts(texts: Sequence[str]) -> list[Prompt]:
    """Return prompts that were typed, by their number from 0000.

    UserError for one with a character that no encoder takes, or without one that is seen.
    """
    prompts = [Prompt(f"{number:04d}", normalized(text), "") for number, text in enumerate(texts)]
    for prompt in prompts:
        if control := unprintable(prompt.text):
            raise UserError(f"prompt {prompt.id} has the character {control!a}: type it as UTF-8")
        if unseen(prompt.text):
            raise UserError(
                f"prompt {prompt.id} has no character that is seen ({prompt.text[:12]!a}): "
                "say what to draw"
            )
    return prompts


def _style(value: object) -> str:
    return (
        ""
        if value is None or (isinstance(value, float) and math.isnan(value))
        else normalized(str(value))
    )


def note_longer(who: str, lengths: Sequence[tuple[str, int]], limit: int) -> None:
    """Print how many texts have more than `limit` tokens, and the longest; nothing if none has.

    lengths: each text with its number of tokens.
    """
    if long := sorted([(-count, text) for text, count in lengths if count > limit]):
        echo(
            f"note: {who} reads {limit} tokens of a prompt and cuts the rest "
            f"of {len(long)} of {len(lengths)} prompts: "
            + in_one_line([f"{visible(text[:60])!r} has {-count}" for count, text in long]),
            file=sys.stderr,
        )


def held_out(train: list[Prompt], test: list[Prompt]) -> tuple[list[Prompt], int]:
    """Return the training prompts that are not test prompts, and how many were left out.

    UserError if none is left. Texts that look alike are the same (`comparable`).
    """
    tested = {comparable(prompt.text) for prompt in test}
    kept = [prompt for prompt in train if comparable(prompt.text) not in tested]
    if not kept:
        raise UserError(
            f"prompts: all {len(train)} training prompts are also test prompts: "
            "nothing would be held out; give other files"
        )
    return kept, len(train) - len(kept)


def choose(prompts: list[Prompt], count: int, seed: int) -> list[Prompt]:
    """Draw `count` of the prompts with a seed, in their order; all of them if there are fewer."""
    if count >= len(prompts):
        return prompts
    chosen = random.Random(seed_of("choose", seed)).sample(range(len(prompts)), count)
    return [prompts[index] for index in sorted(chosen)]


def prompt_order(iteration: int, per_iteration: int, count: int, seed: int) -> list[int]:
    """Return the prompt indices of an iteration; each epoch has its own seeded order."""
    positions = range(iteration * per_iteration, (iteration + 1) * per_iteration)
    orders = {epoch: list(range(count)) for epoch in {position // count for position in positions}}
    for epoch, order in orders.items():
        random.Random(seed_of("visits", seed, epoch)).shuffle(order)
    return [orders[position // count][position % count] for position in positions]


def write_prompts(
    path: Path,
    prompts: list[Prompt],
    left_out: Mapping[str, int] | None = None,
    *,
    data_set: bool = False,
) -> None:
    """Write prompts to Parquet.

    left_out: how many were left out, by reason, kept in the file's metadata if any (see
    `left_out_of`); data_set: whether they are from one, also kept (see `of_data_set`).
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    table = pd.DataFrame(prompts, columns=["id", "text", "style"]).rename(
        columns={"text": "prompt"}
    )
    about = {b"left_out": json.dumps(left_out).encode()} if left_out else {}
    about |= {b"data_set": b"true"} if data_set else {}
    arrow = pa.Table.from_pandas(table, preserve_index=False)
    written = io.BytesIO()
    pq.write_table(
        arrow.replace_schema_metadata({**(arrow.schema.metadata or {}), **about}), written
    )
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
    table = read_table(existing(path), {"id": TEXT, "prompt": TEXT, "style": TEXT})
    if not len(table):
        raise UserError(complaint(path, "holds no prompts"))
    return [Prompt(*row) for row in table.itertuples(index=False)]
