"""Single attributes of the task `words` as judges, for the studies `words` and `words_rates`."""

from collections.abc import Sequence

import torch

from g2rpo_core.tasks.words import Words


class Attributes:
    """The share of the named attributes that an image of a word has, by the exact verifier.

    names: of "first letter", "second letter", "third letter", "color" and "clean".
    """

    def __init__(self, names: Sequence[str]):
        self.names, self.task = tuple(names), Words()

    def score(self, images: torch.Tensor, prompts: list[str]) -> torch.Tensor:
        """Return the shares [N] in [0, 1] of images [N, 3, 32, 32] in [0, 1]."""
        scenes = [self.task.parse(prompt) for prompt in prompts]
        found = self.task.attributes(images.float().cpu(), scenes)
        return torch.tensor([sum(each[name] for name in self.names) for each in found]) / len(
            self.names
        )
