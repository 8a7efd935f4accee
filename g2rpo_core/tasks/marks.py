"""Task `marks`: one to four textured objects of one kind and up to three marks, on 64 x 64 pixels.

Textures repeat every four pixels and marks are as small, so fine detail is half of what a caption
asks for. The verifier searches each quarter of the image for the stencil (shape, size, texture,
position) that best covers the pixels of the asked colour, and looks for marks at the places that
they can have.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product

import numpy as np
import torch
import torch.nn.functional as F

from g2rpo_core.tasks import SIZES
from g2rpo_core.tasks.drawing import (
    BACKGROUND,
    COLORS,
    SHAPES,
    canvas,
    nearest_color,
    paint,
    stencil,
)
from g2rpo_core.tasks.task import Task

SIZE = SIZES["marks"]
QUARTER = SIZE // 2  # pixels: each object has one to itself
COUNTS = ("one", "two", "three", "four")
RADII = {"small": 7.0, "large": 11.0}  # half the side of the bounding box, in pixels
OBJECT_COLORS = tuple(color for color in COLORS if color != "black")
PLURALS = {"circle": "circles", "square": "squares", "triangle": "triangles", "cross": "crosses"}
NO_MARKS = "no marks"
# Words of a caption -> kind of mark, number
MARKS = {NO_MARKS: ("dot", 0)} | {
    f"{count} {mark}{'s' if number > 1 else ''}": (mark, number)
    for mark in ("dot", "bar")
    for number, count in enumerate(COUNTS[:3], 1)
}
# Centres (x, y), between quarters
SPOTS = [(SIZE // 2, y) for y in (8, 24, 40, 56)] + [(x, SIZE // 2) for x in (8, 24, 40, 56)]
AROUND = 5  # pixels: half the side of what belongs to a spot
JITTER = 1  # pixels: centres are drawn up to so far from the middle of their quarter

Y, X = np.indices((SIZE, SIZE))
HOLES = ((Y + 1) // 2 % 2 == 1) & ((X + 1) // 2 % 2 == 1)  # of 2 x 2
# Texture -> the pixels [SIZE, SIZE] that it paints, 0 or 1, wherever the object is
PATTERNS: dict[str, np.ndarray] = {
    "plain": np.ones((SIZE, SIZE), np.float32),
    "striped": (Y // 2 % 2 == 0).astype(np.float32),
    "checked": ((Y // 2 + X // 2) % 2 == 0).astype(np.float32),
    "dotted": (~HOLES).astype(np.float32),
}
CHOICES: dict[str, Sequence[str]] = {
    "count": COUNTS,
    "size": tuple(RADII),
    "texture": tuple(PATTERNS),
    "color": OBJECT_COLORS,
    "shape": SHAPES,
    "marks": tuple(MARKS),
}

# Intersection over union of the asked colour's pixels in a quarter and the best stencil;
# below it, no object is recognised
MIN_IOU = 0.55
AREAS = (16, 600)  # pixels of the asked colour in a quarter: fewer is nothing, more is flooded
MIN_MARK = 4  # pixels of black; a spot with fewer has no mark
MAX_STRAY = 0.02  # share of an image's pixels that are neither background, asked colour nor marks
REACH = 12  # pixels: half a stencil's side; it may lie up to QUARTER / 2 - REACH from the middle


@dataclass(frozen=True)
class MarksScene:
    """Objects of one kind, and black marks; a caption says all of it and leaves positions open."""

    count: str
    size: str
    texture: str
    color: str
    shape: str
    marks: str

    @property
    def noun(self) -> str:
        return self.shape if self.count == "one" else PLURALS[self.shape]

    @property
    def caption(self) -> str:
        return f"{self.count} {self.size} {self.texture} {self.color} {self.noun} with {self.marks}"

    @property
    def style(self) -> str:
        return self.texture


@cache
def mark_cover(mark: str, size: int) -> np.ndarray:
    """Return the coverage [size, size] of a centred mark: a dot of 4 pixels, or a bar of 6 x 2."""
    if mark == "dot":
        return stencil("circle", 2.0, size)
    cover: np.ndarray = np.zeros((size, size), np.float32)
    middle = size // 2
    cover[middle - 1 : middle + 1, middle - 3 : middle + 3] = 1
    return cover


class Marks(Task[MarksScene]):
    """The task of 4,480 captions; a test set of 256 has 64 of each texture."""

    size, colors, styles = SIZE, COLORS, tuple(PATTERNS)
    kinds = CHOICES | {"shape": (*SHAPES, *PLURALS.values())}
    other_words = ("with",)
    example = "three large striped red squares with two dots"

    def random_scene(self, rng: np.random.Generator) -> MarksScene:
        return MarksScene(**{kind: str(rng.choice(words)) for kind, words in CHOICES.items()})

    def changed(self, scene: MarksScene, rng: np.random.Generator) -> MarksScene:
        kind = str(rng.choice(list(CHOICES)))
        return dataclasses.replace(scene, **{kind: str(rng.choice(CHOICES[kind]))})

    def all_scenes(self, style: str) -> tuple[MarksScene, ...]:
        return tuple(
            MarksScene(*words) for words in product(*CHOICES.values()) if words[2] == style
        )

    def parse(self, caption: str) -> MarksScene:
        words, _, marks = caption.partition(" with ")
        singular = {plural: shape for shape, plural in PLURALS.items()}
        try:
            count, size, texture, color, noun = words.split(" ")
            scene = MarksScene(count, size, texture, color, singular.get(noun, noun), marks)
        except ValueError:
            scene = None
        if (
            scene is None
            or any(getattr(scene, kind) not in known for kind, known in CHOICES.items())
            or scene.caption != caption
        ):
            raise ValueError(f"not a caption of a scene with marks: {caption!r}")
        return scene

    def elements(self, scene: MarksScene) -> list[tuple[str, str]]:
        return [(scene.noun if kind == "shape" else getattr(scene, kind), kind) for kind in CHOICES]

    def draw(self, scene: MarksScene, rng: np.random.Generator | None = None) -> np.ndarray:
        """Paint the scene; `rng` draws quarters, spots and jitter.

        Without it, the first quarters and spots are taken, without jitter.
        """
        image = canvas(BACKGROUND, SIZE)
        mark, marks = MARKS[scene.marks]
        objects = COUNTS.index(scene.count) + 1
        quarters = range(objects) if rng is None else rng.permutation(4)[:objects]
        spots = range(marks) if rng is None else rng.permutation(len(SPOTS))[:marks]
        for quarter in quarters:
            jitter = (0, 0) if rng is None else rng.integers(-JITTER, JITTER + 1, size=2)
            dx, dy = (
                QUARTER * int(side) - QUARTER // 2 + int(by)
                for side, by in zip((quarter % 2, quarter // 2), jitter)
            )
            cover = stencil(scene.shape, RADII[scene.size], SIZE, dx, dy) * PATTERNS[scene.texture]
            image = paint(image, cover, COLORS[scene.color])
        for spot in spots:
            dx, dy = (place - SIZE // 2 for place in SPOTS[spot])
            image = paint(image, np.roll(mark_cover(mark, SIZE), (dy, dx), (0, 1)), COLORS["black"])
        return image / 255

    def attributes(
        self, images: torch.Tensor, scenes: Sequence[MarksScene]
    ) -> list[dict[str, bool]]:
        """Check `clean`, the marks, and the objects' count, color, size, texture and shape.

        An attribute holds only if all objects of the asked colour hold it. An object that is not
        recognised is not counted, and holds neither size, texture nor shape.
        """
        labels = nearest_color(images)  # [N, H, W], 0 is the background
        colors = list(COLORS)
        asked = torch.tensor([colors.index(scene.color) + 1 for scene in scenes])[:, None, None]
        objects = (labels == asked).float()
        black = (labels == colors.index("black") + 1).float()
        quarters = objects.unflatten(1, (2, QUARTER)).unflatten(3, (2, QUARTER))
        quarters = quarters.transpose(2, 3).flatten(1, 2)  # [N, 4, 32, 32]
        areas = quarters.sum((2, 3))
        recognised = _best_objects(quarters.flatten(0, 1))
        marks = _marks(black)
        stray = ((labels != 0) & (labels != asked)).float() - black * _near_spots()

        results = []
        for n, scene in enumerate(scenes):
            seen = [
                recognised[4 * n + quarter]
                for quarter in range(4)
                if AREAS[0] <= areas[n, quarter] <= AREAS[1]
            ]
            all_have = lambda place, word, seen=seen: (
                bool(seen) and all(each is not None and each[place] == word for each in seen)
            )
            mark, number = MARKS[scene.marks]
            results.append(
                {
                    "count": sum(each is not None for each in seen)
                    == COUNTS.index(scene.count) + 1,
                    "size": all_have(1, scene.size),
                    "texture": all_have(2, scene.texture),
                    "color": bool(seen),
                    "shape": all_have(0, scene.shape),
                    "marks": marks[n] == [mark] * number,
                    "clean": stray[n].mean().item() <= MAX_STRAY,
                }
            )
        return results


def _best_objects(quarters: torch.Tensor) -> list[tuple[str, str, str] | None]:
    """Find the best stencil's shape, size and texture per mask [32, 32]; None if it fits badly."""
    names = [(shape, size) for shape in SHAPES for size in RADII]
    outlines = torch.stack(
        [
            torch.from_numpy(stencil(shape, RADII[size], 2 * REACH) > 0.5).float()
            for shape, size in names
        ]
    )
    kernels = outlines[:, None]
    ious = []
    for pattern in (torch.from_numpy(each[:QUARTER, :QUARTER]) for each in PATTERNS.values()):
        overlap = F.conv2d((quarters * pattern)[:, None], kernels)  # [N, names, 9, 9]
        area = F.conv2d(pattern[None, None], kernels)
        ious.append(
            (overlap / (quarters.sum((1, 2))[:, None, None, None] + area - overlap))
            .flatten(2)
            .amax(2)
        )
    best, index = torch.cat(ious, 1).max(1)
    textures = list(PATTERNS)
    which = [(*names[i % len(names)], textures[i // len(names)]) for i in index.tolist()]
    return [kind if iou >= MIN_IOU else None for kind, iou in zip(which, best.tolist())]


def _marks(black: torch.Tensor) -> list[list[str]]:
    """Name the marks at the spots of black pixels [N, H, W]: dot, bar or `unknown`."""
    names, side = ("dot", "bar"), 2 * AROUND
    around = [black[:, y - AROUND : y + AROUND, x - AROUND : x + AROUND] for x, y in SPOTS]
    windows = torch.stack(around, 1)  # [N, 8, 10, 10]
    covers = torch.stack(
        [torch.from_numpy(mark_cover(name, side - 2) > 0.5).float() for name in names]
    )
    areas = windows.sum((2, 3))
    overlap = (
        F.conv2d(windows.flatten(0, 1)[:, None], covers[:, None])
        .flatten(2)
        .amax(2)
        .unflatten(0, areas.shape)
    )
    ious = overlap / (areas[..., None] + covers.sum((1, 2)) - overlap)
    best, index = ious.max(2)
    named = lambda iou, which: names[which] if iou >= MIN_IOU else "unknown"
    return [
        [named(iou, which) for area, iou, which in zip(*row) if area >= MIN_MARK]
        for row in zip(areas.tolist(), best.tolist(), index.tolist())
    ]


@cache
def _near_spots() -> torch.Tensor:
    """Return 1 where marks may be, [H, W]."""
    near = torch.zeros(SIZE, SIZE)
    for x, y in SPOTS:
        near[y - AROUND : y + AROUND, x - AROUND : x + AROUND] = 1
    return near
