"""Every method of the paper as settings: where and how noise is added, how samples are finished, and what is trained.

A rollout is a tree: a shared prefix, noise at some steps, tails at some granularities. All differences between the methods
are here and nowhere else: one rollout engine runs any of them, and one trainer trains on the result.
A new method is one line in METHODS.
"""

import random
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from pydantic import Field, field_validator

from g2rpo_core.common.seeding import seed_of
from g2rpo_core.sampling.schedule import Grid
from g2rpo_core.sampling.transitions import SDES, Stochastic
from g2rpo_core.settings import Count, Settings


class Window(Settings):
    """Which of the SDE steps are stochastic in an iteration: a pure function of the iteration's number."""

    size: Count = Field(description="SDE steps in an iteration")
    order: Literal["progressive", "random", "frozen", "scattered"] = Field(
        description="neighbours that move on and start over, neighbours at random, always the first ones, or any steps at random"
    )
    stride: Count = Field(1, description="by how many steps a progressive window moves")
    every: Count = Field(1, description="iterations before the window changes")

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
    """Settings of one method; those of each published method are in METHODS."""

    branching: Literal["each", "all"] = Field(description="each: one branch per SDE step; all: one branch with all of them")
    sde_steps: tuple[int, ...] | Literal["all"] = Field(description="step indices from the noisy end; all: 0...T-2")
    window: Window | None = Field(None, description="which of these are stochastic in an iteration; null: all")
    sde: Literal["flow", "dance", "cps"] = Field(description="which stochastic transition the SDE steps use")
    eta: float = Field(gt=0, le=100, description="how much noise the stochastic transition adds")
    granularities: tuple[int, ...] = Field((1,), min_length=1, description="Lambda: step sizes of the tails")
    grid: Grid = Field("released", description="which steps a tail evaluates, see schedule.tail")
    solver: Literal["euler", "dpm2"] = Field(
        "euler", description="of the tails: first order, or the second-order DPM-Solver++(2M)"
    )
    timestep_fraction: float = Field(
        1.0, gt=0, le=1, description="share of the SDE steps that is trained on, redrawn each iteration"
    )
    updates_per_rollout: Literal["iteration", "step"] | Count = Field(
        "iteration",
        description="one optimizer step per iteration, one per SDE step, or that many, each on its part of every group",
    )
    ratio: Literal["plain", "normalized"] = Field("plain", description="normalized: as GRPO-Guard, see loss.normalized_ratio")
    kl_coef: float = Field(0.0, ge=0, le=1e6, description="beta, weight of the KL divergence to the model before training")

    @field_validator("sde_steps", "granularities")
    @classmethod
    def _rising(cls, value):
        if value != "all" and (not value or list(value) != sorted(set(value))):
            raise ValueError("must be different numbers in rising order, at least one")
        return value

    @field_validator("sde_steps")
    @classmethod
    def _not_negative(cls, value):
        if value != "all" and value[0] < 0:
            raise ValueError("must be 0 or more")
        return value

    @field_validator("granularities")
    @classmethod
    def _at_least_one(cls, value):
        if value[0] < 1:
            raise ValueError("must each be at least 1")
        return value

    def candidates(self, steps: int) -> tuple[int, ...]:
        """Every step index that may be an SDE step for T = steps; the last step, T-1, is always deterministic."""
        return tuple(range(steps - 1)) if self.sde_steps == "all" else self.sde_steps

    def branches(self, steps: int, iteration: int = 0, seed: int = 0) -> tuple[tuple[int, ...], ...]:
        """The SDE steps of every branch of an iteration's tree: one tuple a branch."""
        chosen = self.candidates(steps)
        if self.window:
            chosen = self.window.choose(chosen, iteration, seed)
        return tuple((k,) for k in chosen) if self.branching == "each" else (chosen,)

    def transition(self, sigmas: torch.Tensor) -> Stochastic:
        """The method's stochastic step on the given sigmas."""
        return partial(SDES[self.sde], sigmas=sigmas, eta=self.eta)

    def trained(self, num_sde_steps: int, rng: random.Random) -> list[int]:
        """The sorted indices of the SDE steps, of all branches, that are trained on in this iteration."""
        return sorted(rng.sample(range(num_sde_steps), max(1, round(self.timestep_fraction * num_sde_steps))))


@dataclass(frozen=True)
class MethodSpec:
    """A published method: its name in profiles, its label in reports, and its settings."""

    name: str
    label: str
    settings: Method


# Granular-GRPO, arXiv 2510.01982, Table 3: eta, M (16...9 in its count), Lambda; one step per iteration as in its newest code
_G2RPO = Method(branching="each", sde_steps=tuple(range(8)), sde="flow", eta=0.7, granularities=(1, 2, 3))
# MixGRPO, arXiv 2507.21802 (T = 25): a window of 4 that moves by 1 every 25 iterations; 12 members in steps of 3
_MIX = Method(
    branching="all", sde_steps="all", sde="flow", eta=0.7, window=Window(size=4, order="progressive", every=25), updates_per_rollout=4
)  # fmt: skip
# its Flash form: the steps after the window shortened to 0.4 of them, by a second-order solver
_FLASH = {"grid": "even", "granularities": (3,), "solver": "dpm2", "window": Window(size=4, order="progressive", every=20)}
# Flow-GRPO, arXiv 2505.05470: noise at every step, eta 0.7, KL weight of its PickScore runs
_FLOW = Method(branching="all", sde_steps="all", sde="flow", eta=0.7, kl_coef=0.01)
# Flow-GRPO-Fast: noise at two neighbouring steps, drawn from the first half
_FAST = {"sde_steps": tuple(range(8)), "window": Window(size=2, order="random")}
# DanceGRPO, arXiv 2505.07818: eta 0.3, a random 60 % of the steps is trained on, 12 members in steps of 4
_DANCE = Method(branching="all", sde_steps="all", sde="dance", eta=0.3, timestep_fraction=0.6, updates_per_rollout=3)

SPECS = (
    MethodSpec("g2rpo", "G²RPO", _G2RPO),
    # without multi-granularity advantage integration (Table 1)
    MethodSpec("g2rpo_no_mgai", "G²RPO w/o MGAI", _G2RPO.model_copy(update={"granularities": (1,)})),
    MethodSpec("dance_grpo", "DanceGRPO", _DANCE),
    MethodSpec("mix_grpo", "MixGRPO", _MIX),
    MethodSpec("mix_grpo_flash", "MixGRPO-Flash", _MIX.model_copy(update=_FLASH)),
    MethodSpec("flow_grpo", "Flow-GRPO", _FLOW),
    MethodSpec("flow_grpo_fast", "Flow-GRPO-Fast", _FLOW.model_copy(update=_FAST)),
)
METHODS: dict[str, Method] = {spec.name: spec.settings for spec in SPECS}
LABELS: dict[str, str] = {spec.name: spec.label for spec in SPECS}
