"""Embed the base's and every method's images in a page.

What is shown follows a rule: the prompts that changed most, for better and for worse, and a seeded
draw. Small images are embedded as they are, large ones as thumbnails that link to the lossless
file.
"""

import base64
import io
import os
import random
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import pandas as pd
from PIL import Image

from g2rpo_core.data.prompts import load_prompts
from g2rpo_core.evaluation.results import image_folder
from g2rpo_core.foundation.errors import UserError
from g2rpo_core.foundation.files import complaint, reading, whole
from g2rpo_core.foundation.runs import BASE, evaluation_folder, is_base
from g2rpo_core.reporting.measured import Compared, Sources
from g2rpo_core.reporting.tables import Run, changes
from g2rpo_core.sampling.seeding import seed_of

FIRST = 3  # prompts on the first screen that rose most, as many that fell most, and drawn at random
CHANGED, DRAWN = FIRST, 12  # prompts below, with every model
LARGE = 512  # pixels; a longer side than this becomes a thumbnail
THUMBNAIL = 320
QUALITY = 80  # of WebP


def embed_images(
    sources: Sources, compared: Compared, table: pd.DataFrame, best: Mapping[str, int]
) -> dict[str, Any]:
    """Embed the images of the base and of every method's best seed; best: the best method first.

    Returns `chosen_by`, the model by whose changes prompts are chosen; its `base`; `first`, rows of
    both, by how they were chosen; `columns`, the names of every model, and rows of these: `drawn`
    at random and `changed` most. A row is a `prompt`, its `change` in reward (None: drawn), and
    `images`, as `embed_image` returns them with `told`, what their scores rest on.
    """
    scores = table[table.part == "prompt"].rename(columns={"value": "score"})
    prompts = {prompt.id: prompt.text for prompt in load_prompts(sources.prompts / "test.parquet")}
    if strange := set(scores.prompt_id) - prompts.keys():
        reason = f"lacks the prompt {min(strange)} that was evaluated"
        raise UserError(complaint(sources.prompts / "test.parquet", reason))
    # The folder of each model's images: of a method, those of its best seed
    settings, columns = compared.settings, dict[Run, Path]()
    for method, seed in compared.evaluated:
        if best.get(method, seed) == seed:
            trained = method in settings.methods
            checkpoint = settings.evaluation.checkpoints[0] if trained else "final"
            place = image_folder(checkpoint, settings.evaluation.steps[0])
            folder = sources.evaluations / evaluation_folder(method, seed)
            columns[method, seed] = folder / place
    # The model of the first screen: the best method, and the base that it is compared with
    others = (run for run in compared.evaluated if not is_base(run[0]))
    ahead = next(run for run in [*best.items(), *others] if run in columns)
    base = (compared.bases_of[ahead[0]], BASE[1])
    label = lambda run: (
        compared.labels[run[0]] + (f", seed {run[1]}" if run[0] in settings.methods else "")
    )
    noted = scores.dropna(subset="note").groupby(["method", "seed", "prompt_id"]).note
    told = noted.agg("; ".join).to_dict()

    def rows(runs: Iterable[Run], some: Mapping[str, float | None]) -> list[dict]:
        image = lambda run, key: {
            **embed_image(columns[run] / f"{key}.png", sources.page),
            "told": told.get((*run, key), ""),
        }
        return [
            {"prompt": prompts[key], "images": [image(run, key) for run in runs], "change": change}
            for key, change in some.items()
        ]

    weights = compared.weights[ahead[0]] or next(iter(compared.weights.values()))
    weights = weights or settings.training.rewards
    chosen = choose(changes(scores, ahead, base, weights), sorted(set(scores.prompt_id)))
    *changed, drawn = chosen.values()
    return {
        "base": compared.labels[base[0]],
        "chosen_by": label(ahead),
        "first": {
            how: rows((base, ahead), dict(islice(some.items(), FIRST)))
            for how, some in chosen.items()
            if some
        },
        "columns": list(map(label, columns)),
        "drawn": rows(columns, drawn),
        "changed": [row for some in changed for row in rows(columns, some)],
    }


def choose(change: pd.Series, ids: Sequence[str]) -> dict[str, dict[str, float | None]]:
    """Return the prompts to show, with their changes, by how they are chosen.

    change: of prompts that have one, the worst first, as `changes` returns it; ids: all prompts, of
    which every page of this project draws the same at random: their change is None.
    """
    drawn = random.Random(seed_of("report")).sample(ids, min(DRAWN, len(ids)))
    return {
        "rose most": change[change > 0].iloc[::-1][:CHANGED].to_dict(),
        "fell most": change[change < 0][:CHANGED].to_dict(),
        "drawn at random": dict.fromkeys(drawn),
    }


def embed_image(file: Path, page: Path) -> dict[str, str | None]:
    """Read a PNG for a page in the folder `page`; UserError if it is missing or damaged.

    Returns `source`, a data URI, and `link`, from the page's folder to the lossless file; None if
    the source is that file.
    """
    with reading(whole(file)):
        data = file.read_bytes()
        with Image.open(io.BytesIO(data), formats=["PNG"]) as image:
            small = image.convert("RGB")
    if max(small.size) <= LARGE:
        return {"source": _uri("png", data), "link": None}
    small.thumbnail((THUMBNAIL, THUMBNAIL))
    buffer = io.BytesIO()
    small.save(buffer, "WEBP", quality=QUALITY)
    link = Path(os.path.relpath(file, page)).as_posix()
    return {"source": _uri("webp", buffer.getvalue()), "link": link}


def _uri(kind: str, data: bytes) -> str:
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"
