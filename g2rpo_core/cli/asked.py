"""What `g2rpo probe` is asked to measure."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch

from g2rpo_core.config import Profile
from g2rpo_core.sampling.settings import SamplingSettings

Number = TypeVar("Number", int, float)


@dataclass(frozen=True)
class Asked:
    """What is probed, on what."""

    profile: str
    title: str
    settings: Profile
    sampling: SamplingSettings
    weights: Path | None
    models: Path
    """The folder, as are embeddings."""
    embeddings: Path
    prompts: int
    members: int
    """Of a group."""
    tails: tuple[int, ...]
    seed: int
    device: torch.device


def parse_rising(text: str, number: type[Number]) -> tuple[Number, ...]:
    """Return rising finite numbers above 0, as 1,2,4; none if the text is anything else."""
    try:
        numbers = tuple(number(word) for word in text.split(","))
        rising = all(map(math.isfinite, numbers)) and list(numbers) == sorted(set(numbers))
    except (ValueError, OverflowError):  # a whole number may be too large for a float
        return ()
    return numbers if rising and numbers[0] > 0 else ()
