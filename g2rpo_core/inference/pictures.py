"""Write drawn pictures under names that say prompt and seed, each with its settings inside, and never over another picture."""

import csv
import io
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from g2rpo_core.foundation.files import read_text, reading, write_whole

if TYPE_CHECKING:  # imports torch, which would slow down --help
    import torch

    from g2rpo_core.data.prompts import Prompt

TEXT = "g2rpo"  # the text field of a PNG with its settings as JSON
MOST_STEPS = 100  # of denoising, in a picture for a person to look at
INDEX = "prompts.csv"
COLUMNS = ["file", "prompt", "seed"]


@dataclass
class Pictures:
    """The pictures of prompts with seeds, in a folder."""

    folder: Path
    name: str
    """With which the names of files begin."""
    prompts: "Sequence[Prompt]"
    seeds: Sequence[int]
    origin: dict[str, object]
    """What is in every picture, beside its prompt and seed."""
    grid: bool
    """Whether to write one picture of all at the end."""
    start: int = 0
    """The number of the first prompt in the names of files."""
    index: dict[str, dict[str, str]] = field(default_factory=dict)
    """Rows of INDEX by file."""

    def path(self, number: int, seed: int) -> Path:
        """Return the file of a picture; names sort as prompts and seeds do."""
        prompts, seeds = len(str(self.start + len(self.prompts) - 1)), len(str(max(self.seeds)))
        return self.folder / f"{self.name}-{self.start + number:0{max(4, prompts)}d}-{seed:0{seeds}d}.png"

    @property
    def path_of_grid(self) -> Path:
        return self.folder / f"{self.name}-grid{f'-{self.start:04d}' if self.start else ''}.png"

    def about(self, number: int, seed: int) -> dict[str, object]:
        """Return the settings of a picture."""
        return {**self.origin, "prompt": self.prompts[number].text, "seed": seed}

    @property
    def about_grid(self) -> dict[str, object]:
        return {**self.origin, "prompts": [prompt.text for prompt in self.prompts], "seeds": list(self.seeds)}

    def find_room(self) -> None:
        """Choose the first number from 0 with which no other picture is written over, and read INDEX; UserError if it is not one."""
        while not all(_is_free(path, about) for path, about in self._wanted()):
            self.start += 1
        file = self.folder / INDEX
        if file.exists():
            with reading(file, "it is not what `g2rpo generate` writes: give another --out"):
                rows = list(csv.DictReader(io.StringIO(read_text(file)), strict=True))
                self.index = {row["file"]: {column: row[column] for column in COLUMNS} for row in rows}

    def _wanted(self) -> Iterator[tuple[Path, dict[str, object]]]:
        for number in range(len(self.prompts)):
            yield from ((self.path(number, seed), self.about(number, seed)) for seed in self.seeds)
        if self.grid:
            yield self.path_of_grid, self.about_grid

    def write(self, number: int, images: "torch.Tensor") -> Iterator[Path]:
        """Write the pictures [seeds, 3, H, W] of a prompt, and INDEX; yield their files."""
        from g2rpo_core.inference.painter import png

        for seed, image in zip(self.seeds, images):
            path = self.path(number, seed)
            write_whole(path, png(image, self.about(number, seed)))
            self.index[path.name] = {"file": path.name, "prompt": self.prompts[number].text, "seed": str(seed)}
            yield path
        text = io.StringIO()
        writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(self.index[name] for name in sorted(self.index))
        write_whole(self.folder / INDEX, text.getvalue())

    def write_last(self, rows: "Sequence[torch.Tensor]") -> Iterator[Path]:
        """Write the picture of all, with a row per prompt, if it is wanted; yield its file."""
        import torch
        from torchvision.utils import make_grid

        from g2rpo_core.inference.painter import png

        if self.grid:
            write_whole(self.path_of_grid, png(make_grid(torch.cat(list(rows)), len(self.seeds)), self.about_grid))
            yield self.path_of_grid


def _is_free(path: Path, about: dict[str, object]) -> bool:
    """Tell whether a picture may be written: there is no such file, or it is the same picture."""
    return not path.exists() or (settings_of(path) or {}) | {"shift": 0} == about | {"shift": 0}


def settings_of(path: Path) -> dict | None:
    """Return the settings in a PNG that this module wrote; None for any other file."""
    from PIL import Image

    try:
        with Image.open(path) as image:
            found = json.loads(image.info.get(TEXT, "null"))
    except (OSError, ValueError, Image.DecompressionBombError, SyntaxError):
        return None
    return found if isinstance(found, dict) else None
