"""Every method of the paper as a value: where noise is added, how, how the samples are finished, what is trained.

A rollout is a tree: a shared prefix, noise at some steps, tails at some granularities. What the methods differ in is
written down here, and nowhere else; one executor (`rollout`) runs any of them and one trainer trains on the result.
"""

import random
from functools import partial
from typing import Literal

import torch
from pydantic import Field, field_validator

from .dynamics import SDES, Stochastic
from .schedule import Grid
from .settings import Settings


class Method(Settings):
    """Settings of one method; the defaults of each published method are in METHODS."""

    branching: Literal["each", "all"] = Field(description="a branch with one noisy step for each of them, or one branch with all")
    noisy_steps: tuple[int, ...] | Literal["all"] = Field(description="step indices from the noisy end; all: 0...T-2")
    sde: Literal["flow", "dance"] = Field(description="which stochastic transition the noisy steps use")
    eta: float = Field(gt=0, description="noise level of the stochastic transition")
    granularities: tuple[int, ...] = Field((1,), min_length=1, description="Lambda: step sizes of the tails")
    grid: Grid = Field("released", description="which steps a tail evaluates, see schedule.tail")
    trained_share: float = Field(
        1.0, gt=0, le=1, description="share of the noisy steps, drawn anew each iteration, that is trained"
    )
    updates: Literal["iteration", "step"] = Field(
        "iteration", description="one optimizer step per iteration, or one per noisy step"
    )

    @field_validator("noisy_steps", "granularities")
    @classmethod
    def _rising(cls, value):
        if value != "all" and (not value or list(value) != sorted(set(value))):
            raise ValueError("must be different numbers in rising order, at least one")
        return value

    @field_validator("noisy_steps")
    @classmethod
    def _not_negative(cls, value):
        if value != "all" and value[0] < 0:
            raise ValueError("must be 0 or more")
        return value

    @field_validator("granularities")
    @classmethod
    def _at_least_one(cls, value):
        if value[0] < 1:
            raise ValueError("must be at least 1 each")
        return value

    def noisy(self, steps: int) -> tuple[int, ...]:
        """The noisy step indices for T = steps; the last step, T-1, is always deterministic."""
        return tuple(range(steps - 1)) if self.noisy_steps == "all" else self.noisy_steps

    def branches(self, steps: int) -> tuple[tuple[int, ...], ...]:
        """The noisy steps of every branch of the tree: one tuple a branch."""
        noisy = self.noisy(steps)
        return tuple((k,) for k in noisy) if self.branching == "each" else (noisy,)

    def transition(self, sigmas: torch.Tensor) -> Stochastic:
        """The method's stochastic step on the given noise levels."""
        return partial(SDES[self.sde], sigmas=sigmas, eta=self.eta)

    def trained(self, decisions: int, rng: random.Random) -> list[int]:
        """Which of the `decisions` noisy steps of all branches are trained in this iteration; sorted indices."""
        return sorted(rng.sample(range(decisions), max(1, round(self.trained_share * decisions))))


METHODS: dict[str, Method] = {
    # Granular-GRPO, arXiv 2510.01982, Table 3: eta, M (16...9 in its count), Lambda
    "g2rpo": Method(branching="each", noisy_steps=tuple(range(8)), sde="flow", eta=0.7, granularities=(1, 2, 3)),
    # the same without multi-granularity advantage integration (Table 1)
    "g2rpo_no_mgai": Method(branching="each", noisy_steps=tuple(range(8)), sde="flow", eta=0.7),
    # DanceGRPO, arXiv 2505.07818: eta 0.3, a random 60 % of the steps is trained
    "dance_grpo": Method(branching="all", noisy_steps="all", sde="dance", eta=0.3, trained_share=0.6),
}
