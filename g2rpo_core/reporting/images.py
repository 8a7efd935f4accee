"""Embed the base's and every method's images in a page.

What is shown follows a rule: the prompts that changed most, for better and for worse, and a seeded
draw. Small images are embedded as they are, large ones as thumbnails that link to the lossless
file.
"""

import base64
import io
import math
import os
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

import pandas as pd
from PIL import Image

from g2rpo_core.data.prompts import load_prompts
from g2rpo_core.evaluation.results import image_folder
from g2rpo_core.foundation.errors import UserError
from g2rpo_core.foundation.files import complaint, reading, whole
from g2rpo_core.foundation.runs import BASE, is_base
from g2rpo_core.reporting.measured import Compared, Sources
from g2rpo_core.reporting.tables import Run, changes
from g2rpo_core.sampling.seeding import seed_of

FIRST = 3  # prompts on the first screen that rose most, as many that fell most, and drawn at random
CHANGED, DRAWN = FIRST, 12  # prompts below, with every model
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
    told: str = ""
    """What its scores rest on, such as the text that was read."""


@dataclass(frozen=True)
class PromptImages:
    """One prompt with an image in every column."""

    prompt: str
    images: list[EmbeddedImage]
    change: float = math.nan
    """Of the training reward from the base to the run by which prompts are chosen; NaN: drawn."""

    @property
    def changed(self) -> bool:
        """Return whether the prompt was chosen by its change."""
        return not math.isnan(self.change)


@dataclass(frozen=True)
class Images:
    """The images of a page."""

    base: str
    """The model that `chosen_by` is compared with."""
    chosen_by: str
    """The model whose changes decide which prompts are shown."""
    first: dict[str, list[PromptImages]]
    """Of the base and that model, by how the prompts were chosen."""
    columns: list[str]
    """The names of every model, the columns of what follows."""
    drawn: list[PromptImages]
    changed: list[PromptImages]
    """Those that rose most, then those that fell most."""


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

    # The model of the first screen: the best method, and the base that it is compared with
    others = (run for run in evaluated if not is_base(run[0]))
    ahead = next(run for run in [*best.items(), *others] if run in columns)
    base = (compared.bases_of[ahead[0]], BASE[1])
    label = lambda run: (
        compared.labels[run[0]] + (f", seed {run[1]}" if run[0] in settings.methods else "")
    )
    noted = scores.dropna(subset="note").groupby(["method", "seed", "prompt_id"]).note
    told = noted.agg("; ".join).to_dict()

    def rows(runs: Iterable[Run], some: Mapping[str, float]) -> list[PromptImages]:
        image = lambda run, key: replace(
            embed_image(columns[run] / f"{key}.png", sources.page), told=told.get((*run, key), "")
        )
        return [
            PromptImages(prompts[key], [image(run, key) for run in runs], change)
            for key, change in some.items()
        ]

    weights = compared.weights.get(ahead[0]) or compared.first_weights
    chosen = choose(changes(scores, ahead, base, weights), sorted(set(scores.prompt_id)))
    *changed, drawn = chosen.values()
    return Images(
        base=compared.labels[base[0]],
        chosen_by=label(ahead),
        first={
            how: rows((base, ahead), dict(islice(some.items(), FIRST)))
            for how, some in chosen.items()
            if some
        },
        columns=list(map(label, columns)),
        drawn=rows(columns, drawn),
        changed=[row for some in changed for row in rows(columns, some)],
    )


def choose(change: pd.Series, ids: Sequence[str]) -> dict[str, dict[str, float]]:
    """Return the prompts to show, with their changes, by how they are chosen.

    change: of prompts that have one, the worst first, as `changes` returns it; ids: all prompts, of
    which every page of this project draws the same at random: their change is NaN.
    """
    drawn = random.Random(seed_of("report")).sample(ids, min(DRAWN, len(ids)))
    return {
        "rose most": change[change > 0].iloc[::-1][:CHANGED].to_dict(),
        "fell most": change[change < 0][:CHANGED].to_dict(),
        "drawn at random": dict.fromkeys(drawn, math.nan),
    }


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
