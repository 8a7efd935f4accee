"""Draw prompts as pictures, for `g2rpo generate`."""

import math
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

import torch

from g2rpo_core.cli.options import read_profile
from g2rpo_core.data.prompts import Prompt, given_prompts, read_prompts
from g2rpo_core.evaluation.settings import EvaluationSettings
from g2rpo_core.foundation.errors import UserError
from g2rpo_core.foundation.files import writing
from g2rpo_core.foundation.runs import BASE
from g2rpo_core.foundation.texts import echo
from g2rpo_core.inference.painter import Painter
from g2rpo_core.inference.pictures import MOST_STEPS, SEEN, Pictures
from g2rpo_core.inference.runs import drawn_as, find_weights
from g2rpo_core.sampling.settings import SamplingSettings

MOST_SEEDS = 1000
MOST_PIXELS = 2**27  # of a grid; Pillow refuses to open a picture of over 1.3 times as many


def generate(
    prompts: list[str] | None,
    file: Path | None,
    run: list[str] | None,
    profile: str | None,
    seeds: str,
    steps: int | None,
    guidance: float | None,
    trained_share: float,
    lora_scale: float,
    out: Path,
    grid: bool,
    device: str | None,
) -> None:
    """Check the options, then draw; UserError before any model is loaded."""
    name, settings = read_profile(profile)
    # Check the options
    numbers = parse_seeds(seeds)
    folders = {each: find_weights(each, name) for each in run or BASE[:1]}
    steps = settings.evaluation.steps[0] if steps is None else steps
    if not 1 <= steps <= MOST_STEPS or not 0 < trained_share <= 1:
        raise UserError(
            f"generate: --steps must be at least 1 and at most {MOST_STEPS}, "
            "and --trained-share above 0 and at most 1"
        )
    if not math.isfinite(guidance or 0.0) or not math.isfinite(lora_scale):
        raise UserError("generate: --guidance and --lora-scale must be finite numbers")
    if out.exists() and not out.is_dir():
        raise UserError(f"generate: --out {out} is not a folder")
    texts = read_texts(prompts, file)
    strength = {"trained_share": trained_share, "lora_scale": lora_scale}
    runs = drawn_as(folders, name, settings, guidance)
    pictures = Pictures(
        out,
        list(runs),
        texts,
        numbers,
        {"profile": name, "steps": steps, **strength},
        grid,
        {drawn: {"guidance": how.guidance} for drawn, (_, how) in runs.items()},
    )
    if grid:
        check_grid(len(texts) * len(numbers) * len(runs), settings.evaluation)
    with ExitStack() as until_written:
        with writing(out):
            out.mkdir(parents=True, exist_ok=True)
            until_written.enter_context(pictures.reserved())
        painter = Painter(settings, Path("models", name), device)
        draw_all(painter, pictures, runs, folders, steps, strength)


def draw_all(
    painter: Painter,
    pictures: Pictures,
    runs: Mapping[str, tuple[str, SamplingSettings]],
    folders: Mapping[str, Path | None],
    steps: int,
    strength: Mapping[str, float],
) -> None:
    """Draw every prompt with every seed, by one run after the other, and print each file.

    runs: as of `drawn_as`; folders: the weights of each; strength: trained_share and lora_scale.
    """
    encoded = painter.encode(pictures.prompts)
    kept: dict[str, list[torch.Tensor]] = {drawn: [] for drawn in runs}
    with writing(pictures.folder):
        for drawn, (weights, how) in runs.items():
            painter.forget()
            folder = folders[weights]
            schedule = painter.find_schedule(painter.policy(folder, how))
            pictures.origin["shift"] = schedule.shift_at(steps)
            for number, conditioning in enumerate(encoded):
                images = painter.draw(folder, conditioning, pictures.seeds, steps, how, **strength)
                if pictures.grid:
                    kept[drawn].append(images)
                for path in pictures.write(drawn, number, images):
                    echo(path)
        for path in pictures.write_last(kept):
            echo(path)


def check_grid(images: int, size: EvaluationSettings) -> None:
    """Check that a picture of so many images can be held and opened; UserError otherwise."""
    pixels = images * max(size.height, SEEN) * max(size.width, SEEN)
    if images > 1 and pixels > MOST_PIXELS:
        raise UserError(
            f"generate: --grid: {images} images of {size.width} x {size.height} are too many for "
            f"one picture of {MOST_PIXELS // 2**20} megapixels: omit it, or draw fewer"
        )


def parse_seeds(text: str) -> list[int]:
    """Parse `1,4-6` as 1, 4, 5, 6; UserError for anything else, and for more than 1,000."""
    seeds: dict[int, None] = {}
    try:
        for part in text.split(","):
            first, _, last = part.partition("-")
            span = range(int(first), int(last or first) + 1)
            if len(span[: MOST_SEEDS + 1]) > MOST_SEEDS or int(last or first) >= 2**63:
                raise ValueError
            seeds |= dict.fromkeys(span)
    except ValueError:
        seeds = {}
    if not 0 < len(seeds) <= MOST_SEEDS:
        raise UserError(
            f"generate: --seeds {text}: give whole numbers from 0, as 7, 1,2,5 or 1-4, "
            "at most 1,000"
        )
    return list(seeds)


def read_texts(prompts: list[str] | None, file: Path | None) -> list[Prompt]:
    """Return the prompts from the arguments or the file."""
    if bool(prompts) == bool(file):
        raise UserError("generate: give prompts, or a file of them with --file")
    return read_prompts(file) if file else given_prompts(prompts or [])
