"""Embed the base's and every method's images in a page: a seeded draw of prompts, worst cases.

Small images are embedded as they are, large ones as thumbnails that link to the lossless file.
"""

import base64
import io
import os
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
from PIL import Image

from g2rpo_core.data.prompts import load_prompts
from g2rpo_core.evaluation.results import image_folder
from g2rpo_core.foundation.errors import UserError
from g2rpo_core.foundation.files import complaint, reading, whole
from g2rpo_core.foundation.runs import BASE, is_base
from g2rpo_core.reporting.measured import Compared, Sources
from g2rpo_core.reporting.tables import Run, most_changed
from g2rpo_core.sampling.seeding import seed_of

# prompts drawn for the page, those of them on its first screen, and those that fell most
IMAGES, FIRST, WORST = 12, 6, 6
SHOWN = 4  # methods on the first screen next to the base
LARGE = 512  # pixels; a longer side than this becomes a thumbnail
THUMBNAIL = 320
QUALITY = 80  # of WebP


@dataclass(frozen=True)
class EmbeddedImage:
    """An image as the page's template takes it."""

    source: str
    """A data URI."""
    link: str | None
    """From the page's folder to the lossless file; None if the source is that file."""


@dataclass(frozen=True)
class PromptImages:
    """One prompt with an image in every column."""

    prompt: str
    images: list[EmbeddedImage]
    fall: float = 0.0
    """From the base to the run whose worst cases are shown."""


@dataclass(frozen=True)
class Images:
    """The images of a page; columns name models."""

    first_columns: list[str]
    first: list[PromptImages]
    columns: list[str]
    """Of `more` and `worst`."""
    more: list[PromptImages]
    worst_of: str
    worst: list[PromptImages]


def embed_images(
    sources: Sources, compared: Compared, table: pd.DataFrame, best: Mapping[str, int]
) -> Images:
    """Embed the images of the base and of every method's best seed; best: the best method first."""
    scores = table[table.part == "prompt"].rename(columns={"value": "score"})
    evaluated = sources.folders([*compared.base_runs, *compared.runs, *compared.others])
    prompts = {prompt.id: prompt.text for prompt in load_prompts(sources.prompts / "test.parquet")}
    if strange := set(scores.prompt_id) - prompts.keys():
        reason = f"lacks the prompt {min(strange)} that was evaluated"
        raise UserError(complaint(sources.prompts / "test.parquet", reason))
    # The folder of each model's images: of a method, those of its best seed
    settings, columns = compared.settings, dict[Run, Path]()
    for (method, seed), folder in evaluated.items():
        if best.get(method, seed) == seed:
            trained = method in settings.methods
            checkpoint = settings.evaluation.checkpoints[0] if trained else "final"
            place = image_folder(checkpoint, settings.evaluation.steps[0])
            columns[method, seed] = folder / place

    def row(key: str, runs: Sequence[Run], fall: float = 0.0) -> PromptImages:
        files = (columns[run] / f"{key}.png" for run in runs)
        return PromptImages(prompts[key], [embed_image(file, sources.page) for file in files], fall)

    # The prompts: a draw that every reader gets, and the worst cases of the first run
    ids = sorted(set(scores.prompt_id))
    drawn = random.Random(seed_of("report")).sample(ids, min(IMAGES, len(ids)))
    first = next(run for run in evaluated if not is_base(run[0]))
    base = (compared.bases_of[first[0]], BASE[1])
    worst = most_changed(scores, first, base, compared.first_weights, WORST)
    # The models: the best few on the first screen, all below
    label = lambda run: (
        compared.labels[run[0]] + (f", seed {run[1]}" if run[0] in settings.methods else "")
    )
    few = [run for run in best.items() if run in columns][:SHOWN]
    few, everyone = [*compared.base_runs, *few], list(columns)
    return Images(
        first_columns=list(map(label, few)),
        first=[row(key, few) for key in drawn[:FIRST]],
        columns=list(map(label, everyone)),
        more=[row(key, everyone) for key in drawn[FIRST:]],
        worst_of=label(first),
        worst=[row(key, everyone, fall) for key, fall in worst],
    )


def embed_image(file: Path, page: Path) -> EmbeddedImage:
    """Read a PNG for a page in the folder `page`; UserError if it is missing or damaged."""
    with reading(whole(file)):
        data = file.read_bytes()
        with Image.open(io.BytesIO(data)) as image:
            small = image.convert("RGB")
    if max(small.size) <= LARGE:
        return EmbeddedImage(_uri("png", data), None)
    small.thumbnail((THUMBNAIL, THUMBNAIL))
    buffer = io.BytesIO()
    small.save(buffer, "WEBP", quality=QUALITY)
    return EmbeddedImage(
        _uri("webp", buffer.getvalue()), Path(os.path.relpath(file, page)).as_posix()
    )


def _uri(kind: str, data: bytes) -> str:
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"
