"""All worlds, and which of them a caption belongs to."""

from collections.abc import Sequence
from typing import Any

import torch

from g2rpo_core.worlds.marks import Marks
from g2rpo_core.worlds.names import WORLD_NAMES
from g2rpo_core.worlds.shapes import Shapes
from g2rpo_core.worlds.world import World

WORLDS: dict[str, World[Any]] = dict(zip(WORLD_NAMES, (Shapes(), Marks()), strict=True))


def world_of(caption: str) -> World[Any]:
    """The world of a caption; ValueError if it is of none."""
    for world in WORLDS.values():
        try:
            world.parse(caption)
        except ValueError:
            continue
        return world
    raise ValueError(f"not a caption of the worlds {', '.join(WORLDS)}: {caption!r}")


def verify(images: torch.Tensor, prompts: Sequence[str]) -> torch.Tensor:
    """The exact verifier: the share of asked attributes that each image [N, 3, H, W] in [0, 1] holds, [N] float32 in [0, 1].

    Which world it is, the first caption says. ValueError for other texts, and for images of another size than the world's.
    """
    return world_of(prompts[0]).verify(images, prompts)
