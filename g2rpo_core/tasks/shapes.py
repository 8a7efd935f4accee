"""Task `shapes`: one object at a place, or two of different colours in a relation, on 32 x 32.

The verifier gives every pixel to the nearest colour of the palette; for every object asked for, it
searches the stencil (shape, size, position) that best covers the pixels of its colour,
exhaustively.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
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

SIZE = SIZES["shapes"]
RADII = {"small": 4.0, "large": 6.0}  # half the side of the bounding box, in pixels
PLACES = {
    "in the middle": (16, 16),
    "at the left": (8, 16),
    "at the right": (24, 16),
    "at the top": (16, 8),
    "at the bottom": (16, 24),
    "at the top left": (8, 8),
    "at the top right": (24, 8),
    "at the bottom left": (8, 24),
    "at the bottom right": (24, 24),
}
RELATIONS = {  # centres of the first and the second object
    "left of": ((8, 16), (24, 16)),
    "right of": ((24, 16), (8, 16)),
    "above": ((16, 8), (16, 24)),
    "below": ((16, 24), (16, 8)),
}
JITTER = 1  # pixels: centres are drawn up to so far from the named place
STYLES = ("one object", "two objects")

MIN_IOU = 0.55  # of a colour's pixels and the best stencil; below it, only the colour is recognised
MIN_AREA = 8  # pixels; a colour with fewer is not there
MAX_STRAY = 0.03  # share of the image's pixels that may belong to colours nobody asked for
NEAR = 5.0  # pixels; how far from the named place a centre may lie
_KINDS = [(shape, size) for shape in SHAPES for size in RADII]


@dataclass(frozen=True)
class Object:
    """One shape; its colour, kind and size are the attributes that a caption asks for."""

    color: str
    shape: str
    size: str

    def __str__(self) -> str:
        return f"a {self.size} {self.color} {self.shape}"


@dataclass(frozen=True)
class ShapesScene:
    """One object, `layout` in PLACES, or two of different colours, `layout` in RELATIONS."""

    objects: tuple[Object, ...]
    layout: str

    @property
    def caption(self) -> str:
        if len(self.objects) == 1:
            return f"{self.objects[0]} {self.layout}"
        return f"{self.objects[0]} {self.layout} {self.objects[1]}"

    @property
    def style(self) -> str:
        return STYLES[len(self.objects) - 1]

    @property
    def centers(self) -> tuple[tuple[int, int], ...]:
        """Return (x, y) of every object in pixels, before jitter."""
        return (PLACES[self.layout],) if len(self.objects) == 1 else RELATIONS[self.layout]


class Shapes(Task[ShapesScene]):
    """The task of 8,112 captions: 432 with one object, 7,680 with two."""

    size, colors, styles = SIZE, COLORS, STYLES
    kinds = {"size": RADII, "color": COLORS, "shape": SHAPES, "layout": (*PLACES, *RELATIONS)}
    other_words = ("a",)
    example = "a large red circle above a small blue square"

    def random_scene(self, rng: np.random.Generator) -> ShapesScene:
        """Draw one or two objects with equal probability."""
        count = int(rng.integers(1, 3))
        colors = rng.choice(list(COLORS), size=count, replace=False)
        objects = tuple(
            Object(str(color), str(rng.choice(SHAPES)), str(rng.choice(list(RADII))))
            for color in colors
        )
        return ShapesScene(objects, str(rng.choice(list(PLACES if count == 1 else RELATIONS))))

    def changed(self, scene: ShapesScene, rng: np.random.Generator) -> ShapesScene | None:
        index = int(rng.integers(len(scene.objects)))
        field = str(rng.choice(["color", "shape", "size", "layout"]))
        if field == "layout":
            return dataclasses.replace(
                scene,
                layout=str(rng.choice(list(PLACES if len(scene.objects) == 1 else RELATIONS))),
            )
        objects = list(scene.objects)
        objects[index] = dataclasses.replace(
            objects[index], **{field: str(rng.choice(list(self.kinds[field])))}
        )
        distinct = len({thing.color for thing in objects}) == len(objects)
        return ShapesScene(tuple(objects), scene.layout) if distinct else None

    def all_scenes(self, style: str) -> tuple[ShapesScene, ...]:
        things = [Object(*kind) for kind in product(COLORS, SHAPES, RADII)]
        if style == STYLES[0]:
            return tuple(ShapesScene((thing,), place) for thing in things for place in PLACES)
        return tuple(
            ShapesScene((a, b), relation)
            for a in things
            for b in things
            if a.color != b.color
            for relation in RELATIONS
        )

    def parse(self, caption: str) -> ShapesScene:
        for layouts in (PLACES, RELATIONS):
            for layout in layouts:
                first, has_layout, second = caption.partition(f" {layout}")
                if not has_layout:
                    continue
                try:
                    objects = tuple(_parse_object(text) for text in (first, second.strip()) if text)
                except ValueError:
                    continue
                if len(objects) == (1 if layouts is PLACES else 2):
                    return ShapesScene(objects, layout)
        raise ValueError(f"not a caption of a shape scene: {caption!r}")

    def elements(self, scene: ShapesScene) -> list[tuple[str, str]]:
        """List first object, layout, second object."""
        things = [
            [(thing.size, "size"), (thing.color, "color"), (thing.shape, "shape")]
            for thing in scene.objects
        ]
        return [*things[0], (scene.layout, "layout"), *(things[1] if len(things) > 1 else [])]

    def draw(self, scene: ShapesScene, rng: np.random.Generator | None = None) -> np.ndarray:
        """Paint the scene; `rng` shifts every object by up to JITTER pixels."""
        image = canvas(BACKGROUND, SIZE)
        for thing, (x, y) in zip(scene.objects, scene.centers):
            dx, dy = (0, 0) if rng is None else rng.integers(-JITTER, JITTER + 1, size=2)
            cover = stencil(
                thing.shape,
                RADII[thing.size],
                SIZE,
                int(x - SIZE // 2 + dx),
                int(y - SIZE // 2 + dy),
            )
            image = paint(image, cover, COLORS[thing.color])
        return image / 255

    def attributes(
        self, images: torch.Tensor, scenes: Sequence[ShapesScene]
    ) -> list[dict[str, bool]]:
        """Check colour, shape and size of each object, the layout, and `clean`.

        `clean`: no pixels of colours that nobody asked for. An object that is not recognised holds
        no attribute.
        """
        labels = nearest_color(images)  # [N, H, W], 0 is the background
        colors = list(COLORS)
        asked = [
            (n, colors.index(thing.color) + 1)
            for n, scene in enumerate(scenes)
            for thing in scene.objects
        ]
        masks = torch.stack([labels[n] == color for n, color in asked]).float()
        best = iter(zip(masks.sum((1, 2)).tolist(), _best_stencils(masks)))

        results = []
        for n, scene in enumerate(scenes):
            held, centers = {}, []
            for index, thing in enumerate(scene.objects):
                area, (iou, shape, size, center) = next(best)
                recognised = area >= MIN_AREA and iou >= MIN_IOU
                held[f"color{index}"] = area >= MIN_AREA and area < SIZE * SIZE / 4
                held[f"shape{index}"] = recognised and shape == thing.shape
                held[f"size{index}"] = recognised and size == thing.size
                centers.append(center if recognised else None)
            held["layout"] = all(
                center is not None and abs(center[0] - x) <= NEAR and abs(center[1] - y) <= NEAR
                for center, (x, y) in zip(centers, scene.centers)
            )
            allowed = torch.tensor([0] + [colors.index(thing.color) + 1 for thing in scene.objects])
            held["clean"] = (~torch.isin(labels[n], allowed)).float().mean().item() <= MAX_STRAY
            results.append(held)
        return results


def _parse_object(text: str) -> Object:
    article, size, color, shape = text.split()
    if article != "a" or size not in RADII or color not in COLORS or shape not in SHAPES:
        raise ValueError(text)
    return Object(color, shape, size)


def _best_stencils(masks: torch.Tensor) -> list[tuple[float, str, str, tuple[int, int]]]:
    """Return the best stencil per mask [H, W]: its IoU, shape, size and centre (x, y)."""
    stencils = torch.stack(
        [
            torch.from_numpy(stencil(shape, RADII[size], SIZE) > 0.5).float()
            for shape, size in _KINDS
        ]
    )
    kernels = stencils[:, None, SIZE // 2 - 8 : SIZE // 2 + 8, SIZE // 2 - 8 : SIZE // 2 + 8]
    # [N, kinds, H + 1, W + 1]; index (y, x) is the centre
    overlap = F.conv2d(masks[:, None], kernels, padding=8)
    union = (
        masks.sum((1, 2))[:, None, None, None] + stencils.sum((1, 2))[None, :, None, None] - overlap
    )
    iou, index = (overlap / union).flatten(1).max(1)
    kinds, y, x = torch.unravel_index(index, overlap.shape[1:])
    return [
        (value, *_KINDS[k], (cx, cy))
        for value, k, cx, cy in zip(iou.tolist(), kinds.tolist(), x.tolist(), y.tolist())
    ]
