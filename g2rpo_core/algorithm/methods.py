"""Every method of the paper as settings: where and how noise is added, how samples are finished, and what is trained.

A rollout is a tree: a shared prefix, noise at some steps, tails at some granularities. All differences between the methods
are here and nowhere else: one rollout engine runs any of them, and one trainer trains on the result.
A new method is one line in SPECS.
"""

import random
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from pydantic import Field, field_validator, model_validator

from g2rpo_core.common.seeding import seed_of
from g2rpo_core.rollout.tree import Tree, build, children_of_split
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
    spans: tuple[Count, ...] | None = Field(
        None, description="how many steps of the grid each of the sde_steps takes at once, as E-GRPO; null: one each"
    )
    splits: tuple[int, ...] | None = Field(
        None, description="SDE steps at which states split, as BranchGRPO's; null: the first of a branch, into the whole group"
    )
    split_noise: float = Field(
        1.0, gt=0, le=100, description="factor of the noise, and not of its density, where `splits` names a step"
    )
    initial_noises: Count | Literal["each"] = Field(
        1, description="initial noises of a group, which share its members; each: one a member, as Flow-GRPO samples"
    )
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
    timesteps_of: Literal["group", "member"] = Field(
        "group", description="that share is the same for all members, or drawn anew for each, as DanceGRPO draws it"
    )
    compared: Literal["prompt", "noise"] = Field(
        "prompt", description="an advantage compares all members of a prompt, or those of one initial noise, as TempFlow-GRPO"
    )
    node_advantages: Literal["standardized", "mean"] = Field(
        "standardized",
        description="of a state that several members share: their mean reward standardized anew, as BranchGRPO, or the mean of their "
        "advantages, as TreeGRPO",
    )
    deviation: Literal["group", "batch"] = Field(
        "group",
        description="rewards are divided by the standard deviation of their group, or of the iteration's rewards, as Flow-GRPO",
    )
    credit: Literal["image", "gain"] = Field(
        "image",
        description="an SDE step's reward is that of the image, or what the clean prediction gains by the step, as Stepwise-Flow-GRPO",
    )
    step_weights: Literal["equal", "noise"] = Field(
        "equal", description="of the SDE steps in the loss; noise: by the standard deviation of their noise, as TempFlow-GRPO"
    )
    updates_per_rollout: Literal["iteration", "step"] | Count = Field(
        "iteration",
        description="one optimizer step per iteration, one per SDE step, or that many, each on its part of every group",
    )
    ratio: Literal["plain", "normalized"] = Field("plain", description="normalized: as GRPO-Guard, see loss.normalized_ratio")
    trust_region: Literal["clip", "kl_mask"] = Field(
        "clip", description="the ratio is clipped (training.clip_range), or what has moved too far is masked, as Flow-DPPO"
    )
    kl_threshold: float = Field(
        1e-5, gt=0, le=1e6, description="of kl_mask: KL divergence to the sampling policy, a mean over elements"
    )
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

    @model_validator(mode="after")
    def _fits_together(self):
        if self.spans is not None:
            if self.sde_steps == "all" or len(self.spans) != len(self.sde_steps):
                raise ValueError("spans: needs a number for each of sde_steps")
            if self.branching == "all":
                raise ValueError("spans: needs branching: each, as the steps of one branch may not overlap")
        if self.splits is not None:
            self._check_splits(self.splits)
        elif self.split_noise != 1:
            raise ValueError("split_noise: needs splits")
        if self.credit == "gain" and len(self.granularities) > 1:
            raise ValueError("credit: gain has no tails to compare: granularities must be one")
        if self.compared == "noise" and self.initial_noises == "each":
            raise ValueError("compared: noise needs several members of an initial noise, and initial_noises: each leaves one")
        return self

    def _check_splits(self, splits: tuple[int, ...]) -> None:
        if self.branching == "each" or self.window or not splits:
            raise ValueError("splits: needs branching: all, no window, and at least one step")
        if list(splits) != sorted(set(splits)) or (self.sde_steps != "all" and not set(splits) <= set(self.sde_steps)):
            raise ValueError("splits: must be some of sde_steps, in rising order")
        if self.timesteps_of == "member":
            raise ValueError("timesteps_of: members share states until they have split: must be group")
        if isinstance(self.updates_per_rollout, int) and self.updates_per_rollout > 1:
            raise ValueError("updates_per_rollout: members share states until they have split: must be iteration, step or 1")

    def group_problem(self, group_size: int) -> str | None:
        """Why a group of this size cannot be sampled; None if it can."""
        if self.initial_noises == "each":
            return None
        per_noise, rest = divmod(group_size, self.initial_noises)
        if rest or per_noise < (2 if self.compared == "noise" else 1):
            return f"{group_size} members cannot share {self.initial_noises} initial noises evenly"
        splits = 1 if self.splits is None else len(self.splits)
        if children_of_split(per_noise, splits) is None:
            return f"{per_noise} members of a noise cannot come of {splits} equal splits"
        return None

    def candidates(self, steps: int) -> tuple[int, ...]:
        """Every step index that may be an SDE step for T = steps; the last step, T-1, is always deterministic."""
        return tuple(range(steps - 1)) if self.sde_steps == "all" else self.sde_steps

    def branches(self, steps: int, iteration: int = 0, seed: int = 0) -> tuple[tuple[int, ...], ...]:
        """The SDE steps of every branch of an iteration's tree: one tuple a branch."""
        chosen = self.candidates(steps)
        if self.window:
            chosen = self.window.choose(chosen, iteration, seed)
        return tuple((k,) for k in chosen) if self.branching == "each" else (chosen,)

    def tree(self, steps: int, iteration: int = 0, seed: int = 0) -> Tree:
        """The tree of an iteration's rollout, for T = steps; ValueError as `build`."""
        noises = None if self.initial_noises == "each" else self.initial_noises
        branches, spans = self.branches(steps, iteration, seed), self._spans(steps)
        return build(branches, self.granularities, steps, self.grid, spans, self.splits, noises)

    def _spans(self, steps: int) -> dict[int, int]:
        """How many steps of the grid each candidate takes at once."""
        candidates = self.candidates(steps)
        return dict(zip(candidates, self.spans or (1,) * len(candidates)))

    def last_step(self, steps: int) -> int:
        """The index at which the tails begin that begin last; the tree needs it to be T-1 or less."""
        return max(step + span for step, span in self._spans(steps).items())

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

# the form that reached the full setting's reward with a fifth of its forward evaluations in the first tiny world (docs/findings_first_world.md): one
# SDE step an iteration, from the later part of the first half, and coarse tails alone
_COARSE = {"sde_steps": tuple(range(3, 8)), "window": Window(size=1, order="scattered"), "granularities": (3,)}
# BranchGRPO, arXiv 2509.06040; its script for FLUX (T = 20, G = 16): every state splits in two at four steps, with four times the noise
_BRANCH = Method(branching="all", sde_steps="all", sde="dance", eta=0.3, splits=(0, 3, 6, 9), split_noise=4.0)
# Flow-DPPO, arXiv 2606.11025; its configuration for Stable Diffusion 3.5 (T = 10, G = 16): three steps of the first half, two updates
_DPPO = Method(
    branching="all", sde_steps=tuple(range(5)), window=Window(size=3, order="scattered"), sde="flow", eta=0.7, initial_noises="each",
    deviation="batch", updates_per_rollout=2, trust_region="kl_mask", kl_threshold=1e-5,
)  # fmt: skip
# TempFlow-GRPO, arXiv 2508.04324: one SDE step a branch, at any step; the group shares its initial noise
_TEMPFLOW = Method(branching="each", sde_steps="all", sde="flow", eta=0.7, step_weights="noise")
# E-GRPO, arXiv 2601.00423: SDE steps of low entropy merged. Which ones is ours: its threshold is in a unit that its code does not have
_E_GRPO = Method(branching="each", sde_steps=(0, 1, 2, 3, 4, 6), spans=(1, 1, 1, 1, 2, 2), sde="flow", eta=0.7)

SPECS = (
    MethodSpec("g2rpo", "G²RPO", _G2RPO),
    # without multi-granularity advantage integration (Table 1)
    MethodSpec("g2rpo_no_mgai", "G²RPO w/o MGAI", _G2RPO.model_copy(update={"granularities": (1,)})),
    MethodSpec("dance_grpo", "DanceGRPO", _DANCE),
    MethodSpec("mix_grpo", "MixGRPO", _MIX),
    MethodSpec("mix_grpo_flash", "MixGRPO-Flash", _MIX.model_copy(update=_FLASH)),
    MethodSpec("flow_grpo", "Flow-GRPO", _FLOW),
    MethodSpec("flow_grpo_fast", "Flow-GRPO-Fast", _FLOW.model_copy(update=_FAST)),
    MethodSpec("g2rpo_coarse", "G²RPO, coarse tails", _G2RPO.model_copy(update=_COARSE)),
    MethodSpec("branch_grpo", "BranchGRPO", _BRANCH),
    MethodSpec("e_grpo", "E-GRPO", _E_GRPO),
    MethodSpec("tempflow_grpo", "TempFlow-GRPO", _TEMPFLOW),
    MethodSpec("flow_dppo", "Flow-DPPO", _DPPO),
    # Stepwise-Flow-GRPO, arXiv 2603.28718: Flow-GRPO, but every step has the gain of the clean prediction as its reward
    MethodSpec("stepwise_flow_grpo", "Stepwise-Flow-GRPO", _FLOW.model_copy(update={"credit": "gain"})),
)
METHODS: dict[str, Method] = {spec.name: spec.settings for spec in SPECS}
LABELS: dict[str, str] = {spec.name: spec.label for spec in SPECS}
