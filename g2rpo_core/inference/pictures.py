"""Write images named by prompt and seed, with their settings inside, never over another one."""

import csv
import io
import json
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path

import torch
from PIL import Image, ImageDraw, ImageFont
from PIL.PngImagePlugin import PngInfo

from g2rpo_core.data.prompts import Prompt
from g2rpo_core.foundation.claims import one_at_a_time
from g2rpo_core.foundation.files import read_text, reading, write_whole
from g2rpo_core.foundation.texts import natural
from g2rpo_core.rewards.preprocess import pil_images

TEXT = "g2rpo"  # the text field of a PNG with its settings as JSON
MOST_STEPS = 100  # of denoising, in a picture for a person to look at
INDEX = "prompts.csv"
LOCK = ".generate.lock"  # of a folder of pictures; hidden, so that nobody takes it for one
COLUMNS = ["file", "prompt", "seed"]
# Pixels in the grid: the least of an image's side, of a letter, and between
SEEN, LETTER, GAP = 96, 12, 6


@dataclass
class Pictures:
    """The pictures of prompts with seeds by one or more runs, in a folder."""

    folder: Path
    runs: Sequence[str]
    """With which the names of files begin."""
    prompts: "Sequence[Prompt]"
    seeds: Sequence[int]
    origin: dict[str, object]
    """What is in every picture, beside its run, prompt and seed."""
    grid: bool
    """Whether to write one picture of all at the end."""
    own: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    """What is in a run's pictures alone, by run."""
    start: int = 0
    """The number of the first prompt in the names of files."""
    index: dict[str, dict[str, str]] = field(default_factory=dict)
    """Rows of INDEX by file."""

    def path(self, run: str, number: int, seed: int) -> Path:
        """Return the file of a picture; names sort as prompts and seeds do."""
        prompts, seeds = len(str(self.start + len(self.prompts) - 1)), len(str(max(self.seeds)))
        return (
            self.folder
            / f"{_named(run)}-{self.start + number:0{max(4, prompts)}d}-{seed:0{seeds}d}.png"
        )

    @property
    def path_of_grid(self) -> Path:
        start = f"-{self.start:04d}" if self.start else ""
        return self.folder / f"{'-'.join(map(_named, self.runs))}-grid{start}.png"

    def about(self, run: str, number: int, seed: int) -> dict[str, object]:
        """Return the settings of a picture."""
        return {
            **self.origin,
            **self.own.get(run, {}),
            "run": run,
            "prompt": self.prompts[number].text,
            "seed": seed,
        }

    @property
    def about_grid(self) -> dict[str, object]:
        texts = [prompt.text for prompt in self.prompts]
        own = {
            name: {run: about[name] for run, about in self.own.items()}
            for name in next(iter(self.own.values()), {})
        }
        alike = {
            name: values if len(set(values.values())) > 1 else next(iter(values.values()))
            for name, values in own.items()
        }
        return {
            **self.origin,
            **alike,
            "runs": list(self.runs),
            "prompts": texts,
            "seeds": list(self.seeds),
        }

    @contextmanager
    def reserved(self) -> Iterator[None]:
        """Choose the first number at which no other image is overwritten, and draw in the block.

        Others that draw into this folder wait until it ends. UserError if INDEX is not what
        `g2rpo generate` writes.
        """
        with one_at_a_time(self.folder / LOCK):
            file = self.folder / INDEX
            if file.exists():
                with reading(file, "it is not what `g2rpo generate` writes: give another --out"):
                    rows = csv.DictReader(io.StringIO(read_text(file)), strict=True)
                    self.index = {
                        row["file"]: {column: row[column] for column in COLUMNS} for row in rows
                    }
            # The same picture may be written again
            while any(
                path.exists() and (settings_of(path) or {}) | {"shift": 0} != about | {"shift": 0}
                for path, about in self._wanted()
            ):
                self.start += 1
            yield

    def _wanted(self) -> Iterator[tuple[Path, dict[str, object]]]:
        for each in product(self.runs, range(len(self.prompts)), self.seeds):
            yield self.path(*each), self.about(*each)
        if self.grid:
            yield self.path_of_grid, self.about_grid

    def write(self, run: str, number: int, images: torch.Tensor) -> Iterator[Path]:
        """Write a run's pictures [seeds, 3, H, W] of a prompt, and INDEX; yield their files."""
        for seed, image in zip(self.seeds, pil_images(images)):
            path = self.path(run, number, seed)
            write_whole(path, png(image, self.about(run, number, seed)))
            self.index[path.name] = {
                "file": path.name,
                "prompt": self.prompts[number].text,
                "seed": str(seed),
            }
            yield path
        text = io.StringIO()
        writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(self.index[name] for name in sorted(self.index, key=natural))
        write_whole(self.folder / INDEX, text.getvalue())

    def write_last(self, drawn: Mapping[str, Sequence[torch.Tensor]]) -> Iterator[Path]:
        """Write the grid of all images, if asked for; yield its file.

        drawn: run -> the images [seeds, 3, H, W] of each prompt.
        """
        if self.grid:
            texts = [prompt.text for prompt in self.prompts]
            write_whole(
                self.path_of_grid, png(side_by_side(drawn, texts, self.seeds), self.about_grid)
            )
            yield self.path_of_grid


def side_by_side(
    drawn: Mapping[str, Sequence[torch.Tensor]], prompts: Sequence[str], seeds: Sequence[int]
) -> Image.Image:
    """Draw one grid: each prompt above its row, each run above its columns, one per seed.

    drawn: run, in the order of columns -> the images [seeds, 3, H, W] in [0, 1] of each prompt.
    Images of fewer than SEEN pixels are enlarged.
    """
    # Sizes in pixels
    height, width = next(iter(drawn.values()))[0].shape[2:]
    scale = -(-SEEN // min(height, width))
    font = ImageFont.load_default(LETTER)
    line = LETTER + GAP
    wide = width * scale + GAP
    high = height * scale
    columns = max(wide * len(seeds), *(int(font.getlength(run)) for run in drawn)) + 2 * GAP
    per_line = max(1, int((columns * len(drawn) - 2 * GAP) / font.getlength("m") * 1.7))
    titles = [textwrap.wrap(prompt, per_line) for prompt in prompts]
    total = 2 * line + sum(len(title) * line + high + 2 * GAP for title in titles)
    sheet = Image.new("RGB", (columns * len(drawn) + GAP, total), "white")
    write = ImageDraw.Draw(sheet)
    # Names of runs and seeds, then the prompts with their images
    for place, run in enumerate(drawn):
        write.text((place * columns + GAP, 0), run, "black", font)
        for index, seed in enumerate(seeds):
            write.text((place * columns + GAP + index * wide, line), f"seed {seed}", "gray", font)
    top = 2 * line
    for row, title in enumerate(titles):
        for text in title:
            write.text((GAP, top), text, "black", font)
            top += line
        for place, images in enumerate(drawn.values()):
            for index, image in enumerate(pil_images(images[row])):
                shown = image.resize((width * scale, high), Image.Resampling.NEAREST)
                sheet.paste(shown, (place * columns + GAP + index * wide, top))
        top += high + 2 * GAP
    return sheet


def _named(run: str) -> str:
    """Return a run's name, or its path, as part of a file's name."""
    return run.replace("/", "_")


def settings_of(path: Path) -> dict | None:
    """Return the settings in a PNG that this module wrote; None for any other file."""
    try:
        with Image.open(path, formats=["PNG"]) as image:
            found = json.loads(image.info.get(TEXT, "null"))
    # Of bytes that anybody may have written: Pillow and JSON raise these and more
    except Exception:  # noqa: BLE001
        return None
    return found if isinstance(found, dict) else None


def png(image: Image.Image, origin: Mapping[str, object]) -> bytes:
    """Encode an image as PNG, with its settings as JSON in the text field `g2rpo`."""
    text, file = PngInfo(), io.BytesIO()
    text.add_text(TEXT, json.dumps(origin, allow_nan=False))
    image.save(file, "PNG", pnginfo=text)
    return file.getvalue()
