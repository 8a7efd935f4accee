"""Every method of the paper as a value: where noise is added, how, how the samples are finished, what is trained.

A rollout is a tree: a shared prefix, noise at some steps, tails at some granularities. What the methods differ in is
written down here, and nowhere else; one executor (`rollout`) runs any of them and one trainer trains on the result.
"""

import random
from functools import partial
from typing import Annotated, Literal

import torch
from pydantic import Field, field_validator

from .dynamics import SDES, Stochastic
from .randomness import seed_of
from .schedule import Grid
from .settings import Settings

Positive = Annotated[int, Field(ge=1)]


class Window(Settings):
    """Which of the noisy steps are noisy in an iteration: a pure function of the iteration's number."""

    size: Positive = Field(description="noisy steps in an iteration")
    order: Literal["progressive", "random", "frozen", "scattered"] = Field(
        description="neighbours that move on and start again, neighbours drawn at random, the first ones, or any ones drawn at random"
    )
    stride: Positive = Field(1, description="by how many steps a progressive window moves")
    every: Positive = Field(1, description="iterations for which a window stays")

    def choose(self, candidates: tuple[int, ...], iteration: int, seed: int) -> tuple[int, ...]:
        """`size` of the candidates (all, if there are fewer), in rising order; iteration counts from 0."""
        position = iteration // self.every
        rng = random.Random(seed_of("window", seed, position))
        starts = max(1, len(candidates) - self.size + 1)
        if self.order == "scattered":
            return tuple(sorted(rng.sample(candidates, min(self.size, len(candidates)))))
        start = {"progressive": position * self.stride % starts, "random": rng.randrange(starts), "frozen": 0}[self.order]
        return candidates[start : start + self.size]


class Method(Settings):
    """Settings of one method; the defaults of each published method are in METHODS."""

    branching: Literal["each", "all"] = Field(description="a branch with one noisy step for each of them, or one branch with all")
    noisy_steps: tuple[int, ...] | Literal["all"] = Field(description="step indices from the noisy end; all: 0...T-2")
    window: Window | None = Field(None, description="which of these are noisy in an iteration; null: all")
    sde: Literal["flow", "dance", "cps"] = Field(description="which stochastic transition the noisy steps use")
    eta: float = Field(gt=0, description="noise level of the stochastic transition")
    granularities: tuple[int, ...] = Field((1,), min_length=1, description="Lambda: step sizes of the tails")
    grid: Grid = Field("released", description="which steps a tail evaluates, see schedule.tail")
    solver: Literal["euler", "dpm2"] = Field(
        "euler", description="of the tails: first order, or the second-order DPM-Solver++(2M)"
    )
    trained_share: float = Field(
        1.0, gt=0, le=1, description="share of the noisy steps, drawn anew each iteration, that is trained"
    )
    updates: Literal["iteration", "step"] | Positive = Field(
        "iteration",
        description="one optimizer step per iteration, one per noisy step, or that many, each on its part of every group",
    )
    ratio: Literal["plain", "normalized"] = Field(
        "plain", description="normalized: as GRPO-Guard, see objective.normalized_ratio"
    )
    kl: float = Field(0.0, ge=0, description="beta, weight of the KL divergence to the model before training")

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

    def candidates(self, steps: int) -> tuple[int, ...]:
        """Every step index that may be noisy for T = steps; the last step, T-1, is always deterministic."""
        return tuple(range(steps - 1)) if self.noisy_steps == "all" else self.noisy_steps

    def branches(self, steps: int, iteration: int = 0, seed: int = 0) -> tuple[tuple[int, ...], ...]:
        """The noisy steps of every branch of an iteration's tree: one tuple a branch."""
        noisy = self.candidates(steps)
        if self.window:
            noisy = self.window.choose(noisy, iteration, seed)
        return tuple((k,) for k in noisy) if self.branching == "each" else (noisy,)

    def transition(self, sigmas: torch.Tensor) -> Stochastic:
        """The method's stochastic step on the given noise levels."""
        return partial(SDES[self.sde], sigmas=sigmas, eta=self.eta)

    def trained(self, decisions: int, rng: random.Random) -> list[int]:
        """Which of the `decisions` noisy steps of all branches are trained in this iteration; sorted indices."""
        return sorted(rng.sample(range(decisions), max(1, round(self.trained_share * decisions))))


# Granular-GRPO, arXiv 2510.01982, Table 3: eta, M (16...9 in its count), Lambda; one step an iteration as its newest code has it
_G2RPO = Method(branching="each", noisy_steps=tuple(range(8)), sde="flow", eta=0.7, granularities=(1, 2, 3))
# MixGRPO, arXiv 2507.21802 (T = 25): a window of 4 that moves by 1 every 25 iterations; 12 members in steps of 3
_MIX = Method(
    branching="all", noisy_steps="all", sde="flow", eta=0.7, window=Window(size=4, order="progressive", every=25), updates=4
)
# Flow-GRPO, arXiv 2505.05470: noise at every step, eta 0.7, KL weight of its PickScore runs
_FLOW = Method(branching="all", noisy_steps="all", sde="flow", eta=0.7, kl=0.01)

METHODS: dict[str, Method] = {
    "g2rpo": _G2RPO,
    # the same without multi-granularity advantage integration (Table 1)
    "g2rpo_no_mgai": _G2RPO.model_copy(update={"granularities": (1,)}),
    # DanceGRPO, arXiv 2505.07818: eta 0.3, a random 60 % of the steps is trained, 12 members in steps of 4
    "dance_grpo": Method(branching="all", noisy_steps="all", sde="dance", eta=0.3, trained_share=0.6, updates=3),
    "mix_grpo": _MIX,
    # its Flash form: the steps after the window shortened to 0.4 of them, by a second-order solver
    "mix_grpo_flash": _MIX.model_copy(
        update={"grid": "even", "granularities": (3,), "solver": "dpm2", "window": Window(size=4, order="progressive", every=20)}
    ),
    "flow_grpo": _FLOW,
    # Flow-GRPO-Fast: noise at two neighbouring steps, drawn from the first half
    "flow_grpo_fast": _FLOW.model_copy(update={"noisy_steps": tuple(range(8)), "window": Window(size=2, order="random")}),
}
