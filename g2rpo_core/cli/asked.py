"""What `g2rpo probe` is asked to measure."""

from dataclasses import dataclass
from pathlib import Path

import torch

from g2rpo_core.config import Profile
from g2rpo_core.sampling.settings import SamplingSettings


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

    @property
    def rewards(self) -> str:
        return " + ".join(self.settings.training.rewards)
