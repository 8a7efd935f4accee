"""Random numbers for copies of an image that no eye can tell apart."""

import torch

from studies.dose.reward import Noise


class NoiseOfCopy(Noise):
    """`Noise` of an image that is brighter by copy / 4096, a sixteenth of an 8-bit level each."""

    def __init__(self, copy: int):
        self.copy = copy

    def score(self, images: torch.Tensor, prompts: list[str]) -> torch.Tensor:
        """Return the scores [N] of images [N, 3, H, W]."""
        return super().score(images + self.copy / 4096, prompts)
