"""Captioned scenes of coloured shapes: what profile `tiny` draws, says and asks for.

A scene is one object at a place, or two objects of different colours in a relation. Its caption names every
attribute of every object, so that an image can be checked against it exactly (see `verifier`).
"""

import zlib
from collections.abc import Collection
from dataclasses import dataclass
from functools import cache
from itertools import product

import numpy as np
from PIL import Image, ImageDraw

SIZE = 32  # pixels, square images
SUPERSAMPLING = 8
BACKGROUND = (236, 236, 232)
COLORS = {
    "red": (214, 40, 40),
    "green": (44, 150, 70),
    "blue": (40, 80, 200),
    "yellow": (244, 196, 20),
    "purple": (150, 50, 170),
    "black": (30, 30, 34),
}
SHAPES = ("circle", "square", "triangle", "cross")
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


@dataclass(frozen=True)
class Object:
    """One shape: its colour, kind and size are the attributes that a caption asks for."""

    color: str
    shape: str
    size: str

    def __str__(self) -> str:
        return f"a {self.size} {self.color} {self.shape}"


@dataclass(frozen=True)
class Scene:
    """One object with `layout` in PLACES, or two of different colours with `layout` in RELATIONS."""

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
        """(x, y) of every object in pixels, before jitter."""
        return (PLACES[self.layout],) if len(self.objects) == 1 else RELATIONS[self.layout]


def parse_caption(caption: str) -> Scene:
    """The scene that `caption` describes; inverse of `Scene.caption`.

    Raises ValueError for a text that no scene of the shapes task has.
    """
    for layouts in (PLACES, RELATIONS):
        for layout in layouts:
            first, found, second = caption.partition(f" {layout}")
            if not found:
                continue
            try:
                objects = tuple(_parse_object(text) for text in (first, second.strip()) if text)
            except ValueError:
                continue
            if len(objects) == (1 if layouts is PLACES else 2):
                return Scene(objects, layout)
    raise ValueError(f"not a caption of a shape scene: {caption!r}")


def _parse_object(text: str) -> Object:
    article, size, color, shape = text.split()
    if article != "a" or size not in RADII or color not in COLORS or shape not in SHAPES:
        raise ValueError(text)
    return Object(color, shape, size)


def random_scene(rng: np.random.Generator) -> Scene:
    """A scene with one or two objects, half and half; all attributes are uniform."""
    count = int(rng.integers(1, 3))
    colors = rng.choice(list(COLORS), size=count, replace=False)
    objects = tuple(Object(str(color), str(rng.choice(SHAPES)), str(rng.choice(list(RADII)))) for color in colors)
    return Scene(objects, str(rng.choice(list(PLACES if count == 1 else RELATIONS))))


def held_out(caption: str) -> bool:
    """Whether `caption` belongs to the quarter of all captions that no model is trained on, by its checksum."""
    return zlib.crc32(caption.encode()) % 4 == 0


@cache
def all_scenes(style: str) -> tuple[Scene, ...]:
    """Every scene of a style: 432 with one object, 7,680 with two."""
    things = [Object(*kind) for kind in product(COLORS, SHAPES, RADII)]
    if style == STYLES[0]:
        return tuple(Scene((thing,), place) for thing in things for place in PLACES)
    return tuple(Scene((a, b), relation) for a in things for b in things if a.color != b.color for relation in RELATIONS)


def distinct_scenes(count: int, seed: int, *, testing: bool, without: Collection[str] = ()) -> list[Scene]:
    """`count` different scenes by a seeded draw, of the held-out captions if `testing`, else of the others; none of `without`.

    Half have one object, or as many as there are. Raises ValueError if there are fewer captions of that kind.
    """
    rng = np.random.default_rng(seed)
    fits = lambda caption: held_out(caption) == testing and caption not in without
    pools = [[scene for scene in all_scenes(style) if fits(scene.caption)] for style in STYLES]
    single = min(count // 2, len(pools[0]))
    if count - single > len(pools[1]):
        raise ValueError(f"the shapes task has no {count} different {'held-out' if testing else 'training'} captions")
    chosen = [pool[index] for pool, size in zip(pools, (single, count - single)) for index in rng.permutation(len(pool))[:size]]
    return [chosen[index] for index in rng.permutation(count)]


def sample(count: int, seed: int, *, testing: bool) -> tuple[list[Scene], np.ndarray]:
    """`count` scenes (captions may repeat) and their images [count, 3, SIZE, SIZE] with jitter; see `distinct_scenes`."""
    rng = np.random.default_rng(seed)
    scenes: list[Scene] = []
    while len(scenes) < count:
        scene = random_scene(rng)
        if held_out(scene.caption) == testing:
            scenes.append(scene)
    return scenes, np.stack([draw(scene, rng) for scene in scenes])


@cache
def stencil(shape: str, size: str, dx: int = 0, dy: int = 0) -> np.ndarray:
    """Coverage [SIZE, SIZE] in [0, 1] of one shape centred at (16 + dx, 16 + dy)."""
    scale, radius = SUPERSAMPLING, RADII[size]
    canvas = Image.new("L", (SIZE * scale, SIZE * scale))
    draw = ImageDraw.Draw(canvas)
    cx, cy, r = (SIZE / 2 + dx) * scale, (SIZE / 2 + dy) * scale, radius * scale
    if shape == "circle":
        draw.ellipse((cx - r, cy - r, cx + r, cy + r), fill=255)
    elif shape == "square":
        draw.rectangle((cx - r, cy - r, cx + r - 1, cy + r - 1), fill=255)
    elif shape == "triangle":
        draw.polygon(((cx, cy - r), (cx + r, cy + r), (cx - r, cy + r)), fill=255)
    elif shape == "cross":
        draw.rectangle((cx - r, cy - r / 3, cx + r, cy + r / 3), fill=255)
        draw.rectangle((cx - r / 3, cy - r, cx + r / 3, cy + r), fill=255)
    else:
        raise ValueError(f"shape must be one of {SHAPES}, got {shape!r}")
    return np.asarray(canvas.resize((SIZE, SIZE), Image.Resampling.BOX), dtype=np.float32) / 255


def draw(scene: Scene, rng: np.random.Generator | None = None) -> np.ndarray:
    """Image [3, SIZE, SIZE], float32 in [0, 1]; `rng` shifts every object by up to JITTER pixels."""
    image = np.broadcast_to(np.array(BACKGROUND, np.float32)[:, None, None], (3, SIZE, SIZE)).copy()
    for thing, (x, y) in zip(scene.objects, scene.centers):
        dx, dy = (0, 0) if rng is None else rng.integers(-JITTER, JITTER + 1, size=2)
        cover = stencil(thing.shape, thing.size, int(x - SIZE // 2 + dx), int(y - SIZE // 2 + dy))
        color = np.array(COLORS[thing.color], np.float32)[:, None, None]
        image = image * (1 - cover) + color * cover
    return image / 255
