"""GenEval's rule (arXiv 2310.11513): what a prompt asks for, and whether found objects fulfil it.

The rule is that of https://github.com/djghosh13/geneval, `evaluation/evaluate_images.py`; the
shares of what is asked are those that Flow-GRPO trains on
(https://github.com/yifan123/reward-server, `reward_server/gen_eval.py`). One thing differs: there,
a relation that does not hold counts both as 0 and as 1, and here only as 0.
"""

import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

COLORS = ("red", "orange", "yellow", "green", "blue", "purple", "pink", "brown", "black", "white")
NUMBERS = {
    "two": 2,
    "three": 3,
    "four": 4,
    "five": 5,
    "six": 6,
    "seven": 7,
    "eight": 8,
    "nine": 9,
    "ten": 10,
}
RELATIONS = ("left of", "right of", "above", "below")
OTHER_NAMES = {  # of COCO's classes in the configurations of detectors -> GenEval's
    "mouse": "computer mouse",
    "remote": "tv remote",
    "keyboard": "computer keyboard",
    "motorbike": "motorcycle",
    "aeroplane": "airplane",
    "sofa": "couch",
    "pottedplant": "potted plant",
    "diningtable": "dining table",
    "tvmonitor": "tv",
}
ONE = re.compile(r"an? (.+)")
TWO = re.compile(rf"an? (.+?) (and|{'|'.join(RELATIONS)}) an? (.+)")
SEVERAL = re.compile(rf"({'|'.join(NUMBERS)}) (.+)")
TEMPLATES = "a photo of a X; a X and a Y; two Xs; a red X; a X left of a Y; a red X and a blue Y"

Box = tuple[float, float, float, float]


@dataclass(frozen=True)
class Thing:
    """Objects of one class that a prompt asks for."""

    name: str
    count: int = 1
    color: str | None = None


class Asked(NamedTuple):
    """One or two classes, and the position of the first relative to the second."""

    things: tuple[Thing, ...]
    relation: str | None = None

    @property
    def counting(self) -> bool:
        """Return whether the prompt is of the kind that names a number."""
        return self.things[0].count > 1


class Found(NamedTuple):
    """An object that the detector found."""

    score: float
    box: Box
    """Left, top, right and bottom, in pixels."""
    mask: np.ndarray | None = None
    """[H, W] bool, of the whole image; None if the detector only finds boxes."""


Objects = Mapping[str, Sequence[Found]]  # by class, the surest first
ColorsOf = Callable[[Sequence[Found], str], Sequence[str]]  # of objects and the name of their class


def class_name(label: str) -> str:
    """Return GenEval's name of a detector's class."""
    return OTHER_NAMES.get(label.lower(), label.lower())


def parse(prompt: str, classes: Collection[str] | None = None) -> Asked:
    """Read a prompt of one of GenEval's six kinds.

    classes: in lower case; None accepts every word, and leaves a plural (in s or es) as it is.
    ValueError for a prompt of no kind, or for a class that is not among them.
    """
    text = " ".join(prompt.lower().split()).removesuffix(".")
    asked = text.removeprefix("a photo of ")
    several, two, one = (kind.fullmatch(asked) for kind in (SEVERAL, TWO, ONE))
    if asked == text or not (several or two or one):
        raise ValueError(f"not a prompt of GenEval ({TEMPLATES})")
    if several:
        return Asked((Thing(_singular(several[2], classes), NUMBERS[several[1]]),))
    named = (two[1], two[3]) if two else (one[1],)  # type: ignore[index]
    things = tuple(_thing(words, classes) for words in named)
    relation = two[2] if two and two[2] != "and" else None
    colored = {thing.color is not None for thing in things}
    if len(colored) > 1 or (relation and True in colored):
        raise ValueError(
            "not a prompt of GenEval: both objects have a colour, or none, "
            "and none has one beside a position"
        )
    if len({thing.name for thing in things}) < len(things):
        raise ValueError(f"not a prompt of GenEval: it names {things[0].name!r} twice")
    return Asked(things, relation)


def _thing(words: str, classes: Collection[str] | None) -> Thing:
    """Read a class, and the colour before it: an orange has none, an orange bus has one."""
    first, _, rest = words.partition(" ")
    color, name = (first, rest) if first in COLORS and rest else (None, words)
    if classes is not None and name not in classes:
        raise ValueError(f"the detector knows no {name!r}")
    return Thing(name, color=color)


def _singular(plural: str, classes: Collection[str] | None) -> str:
    if classes is None:
        return plural
    for ending in ("s", "es"):
        if plural.endswith(ending) and (name := plural.removesuffix(ending)) in classes:
            return name
    raise ValueError(f"the detector knows no {plural!r}")


def keep(found: Sequence[Found], threshold: float, most: int, max_overlap: float) -> list[Found]:
    """Return the objects of one class that count, the surest first.

    These are the `most` surest above `threshold`, without those whose intersection over union with
    a surer one is at least `max_overlap`; 1 keeps all.
    """
    kept: list[Found] = []
    for one in sorted((one for one in found if one.score > threshold), key=lambda one: -one.score)[
        :most
    ]:
        if max_overlap == 1 or all(overlap(one.box, other.box) < max_overlap for other in kept):
            kept.append(one)
    return kept


def overlap(a: Box, b: Box) -> float:
    """Return the intersection over union of two boxes, whose last pixels count, as published."""
    area = lambda left, top, right, bottom: max(right - left + 1, 0) * max(bottom - top + 1, 0)
    both = area(max(a[0], b[0]), max(a[1], b[1]), min(a[2], b[2]), min(a[3], b[3]))
    either = area(*a) + area(*b) - both
    return both / either if either else 0.0


def relations(a: Box, b: Box, margin: float) -> set[str]:
    """Return which of RELATIONS box `a` has to `b`: at most two, none if their centres are close.

    On each axis, the distance of the centres counts as far as it is longer than `margin` times the
    sum of both extents. A relation holds if that is more than half of the distance between the
    centres.
    """
    offset = [(a[axis] + a[axis + 2] - b[axis] - b[axis + 2]) / 2 for axis in (0, 1)]
    extent = [abs(a[axis + 2] - a[axis]) + abs(b[axis + 2] - b[axis]) for axis in (0, 1)]
    beyond = [
        math.copysign(max(abs(way) - margin * size, 0.0), way) for way, size in zip(offset, extent)
    ]
    if max(map(abs, beyond)) < 1e-3:
        return set()
    x, y = (way / math.hypot(*offset) for way in beyond)
    return {name for name, along in zip(RELATIONS, (-x, x, -y, y)) if along > 0.5}


def fulfils(asked: Asked, objects: Objects, colors_of: ColorsOf, margin: float) -> bool:
    """Return whether an image shows what is asked, as GenEval reports it.

    The surest objects of a class count. Others may be there, unless a number is asked for.
    """
    surest = [objects.get(thing.name, ())[: thing.count] for thing in asked.things]
    if any(len(found) < thing.count for thing, found in zip(asked.things, surest)):
        return False
    if asked.counting and len(objects[asked.things[0].name]) > asked.things[0].count:
        return False
    colored = [(thing, found) for thing, found in zip(asked.things, surest) if thing.color]
    if any(
        _count(colors_of(found, thing.name), thing.color) < thing.count for thing, found in colored
    ):
        return False
    return asked.relation is None or _related(asked.relation, surest, margin)


def share(asked: Asked, objects: Objects, colors_of: ColorsOf, margin: float) -> float:
    """Return the mean over what is asked, at most 1, as Flow-GRPO trains on it.

    A class of n objects of which k are found counts 1 - |n - k| / n, which is negative for more
    than 2 n objects. A colour counts likewise and a relation 0 or 1, and both 0 unless the numbers
    are exact.
    """
    parts: list[float] = []
    found = [objects.get(thing.name, ()) for thing in asked.things]
    exact = [len(these) == thing.count for thing, these in zip(asked.things, found)]
    for thing, these, right in zip(asked.things, found, exact):
        parts.append(1 - abs(thing.count - len(these)) / thing.count)
        if thing.color:
            fitting = _count(colors_of(these, thing.name), thing.color) if right else 0
            parts.append(1 - abs(thing.count - fitting) / thing.count)
    if asked.relation:
        parts.append(float(all(exact) and _related(asked.relation, found, margin)))
    return sum(parts) / len(parts)


def _count(colors: Sequence[str], asked: str | None) -> int:
    return sum(color == asked for color in colors)


def _related(relation: str, found: Sequence[Sequence[Found]], margin: float) -> bool:
    return all(relation in relations(a.box, b.box, margin) for a in found[0] for b in found[1])
