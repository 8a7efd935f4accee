"""Tree settings: where noise is added, how states branch there, and how samples are finished.

A rollout is a tree: a shared prefix, noise at some steps, tails at some granularities. One engine
(`sampling.rollout`) runs any of them.
"""

import random
from functools import partial
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field, field_validator, model_validator

from g2rpo_core.foundation.settings import Count, Settings
from g2rpo_core.sampling.schedule import Grid
from g2rpo_core.sampling.seeding import seed_of
from g2rpo_core.sampling.transitions import SDES, Stochastic
from g2rpo_core.sampling.tree import Tree, build, children_of_split


class Window(Settings):
    """Which SDE steps are stochastic in an iteration: a pure function of the iteration's number."""

    size: Count = Field(description="SDE steps in an iteration.")
    order: Literal["progressive", "random", "frozen", "scattered"] = Field(
        description=(
            "`progressive`: neighbouring steps that move on and start over; "
            "`random`: neighbouring steps at a random place; "
            "`frozen`: always the first steps; `scattered`: any steps at random."
        )
    )
    stride: Count = Field(1, description="Steps by which a progressive window moves.")
    every: Count = Field(1, description="Iterations before the window changes.")

    def choose(self, candidates: tuple[int, ...], iteration: int, seed: int) -> tuple[int, ...]:
        """Return `size` candidates (all if there are fewer), rising; iteration counts from 0."""
        position = iteration // self.every
        # Not the state of a generator: a resumed run must choose the same window
        rng = random.Random(seed_of("window", seed, position))
        # A window at the end does not wrap around: its steps stay neighbours
        starts = max(1, len(candidates) - self.size + 1)
        if self.order == "scattered":
            return tuple(sorted(rng.sample(candidates, min(self.size, len(candidates)))))
        start = {
            "progressive": position * self.stride % starts,
            "random": rng.randrange(starts),
            "frozen": 0,
        }[self.order]
        return candidates[start : start + self.size]


class _Tree(Settings):
    """The defaults of every tree: no noise on the way.

    The section `tree` of a method is one of the four subclasses without underscore.
    """

    def candidates(self, steps: int) -> tuple[int, ...]:
        """Return every step index that may be an SDE step for T = steps."""
        return ()

    def branches(
        self, steps: int, iteration: int = 0, seed: int = 0
    ) -> tuple[tuple[int, ...], ...]:
        """Return the SDE steps of every branch of an iteration's tree: one tuple per branch."""
        return (self.candidates(steps),)

    def spans_at(self, steps: int) -> dict[int, int]:
        """Return how many steps of the grid each candidate takes at once."""
        return dict.fromkeys(self.candidates(steps), 1)

    def split_steps(self) -> tuple[int, ...] | None:
        """Return the SDE steps at which states split; None for the first of every branch."""
        return None

    def scaled(self, noise: torch.Tensor, step: int) -> torch.Tensor:
        """Scale the noise of an SDE step by this tree's factor, which the density leaves out."""
        return noise

    def build(self, steps: int, iteration: int = 0, seed: int = 0) -> Tree:
        """Build the tree of an iteration, for T = steps; ValueError as `sampling.tree.build`."""
        return build(self.branches(steps, iteration, seed), (1,), steps, initial_noises=None)

    def last_step(self, steps: int) -> int:
        """Return the latest step index at which a tail starts; it must be at most T-1."""
        return max((step + span for step, span in self.spans_at(steps).items()), default=0)

    def transition(self, sigmas: torch.Tensor) -> Stochastic | None:
        """Return the stochastic step on the given sigmas; None for a tree without SDE steps."""
        return None

    def group_problem(self, group_size: int, fewest: int) -> str | None:
        """Say why a group of this size cannot be sampled; None if it can.

        fewest: members that an initial noise needs.
        """
        return None


class _Branching(_Tree):
    """What the trees with SDE steps have in common."""

    branching: str
    sde_steps: tuple[int, ...] | Literal["all"] = Field(
        description="Step indices from the noisy end; `all`: 0...T-2."
    )
    initial_noises: Count | Literal["each"] = Field(
        1,
        description=(
            "Initial noises of a group, shared evenly by its members; "
            "`each`: one per member (Flow-GRPO)."
        ),
    )
    sde: Literal["flow", "dance", "cps"] = Field(
        description="Stochastic transition of the SDE steps."
    )
    eta: float = Field(gt=0, le=100, description="How much noise the stochastic transition adds.")
    granularities: tuple[int, ...] = Field(
        (1,), min_length=1, description="Lambda, the step sizes of the tails."
    )
    grid: Grid = Field("released", description="Which steps a tail evaluates, see `schedule.tail`.")
    solver: Literal["euler", "dpm2"] = Field(
        "euler",
        description="Solver of the tails: first order, or the second-order DPM-Solver++(2M).",
    )

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
    def _noise_has_room(self):
        if self.sde == "cps" and self.eta > 1:
            raise ValueError(
                f"eta: {self.eta:g} is more noise than there is: at most 1 with sde: cps, "
                "which then replaces all of it"
            )
        return self

    def candidates(self, steps: int) -> tuple[int, ...]:
        """Return every step index that may be an SDE step; the last, T-1, is deterministic."""
        # At the last step noise would stay in the image
        return tuple(range(steps - 1)) if self.sde_steps == "all" else self.sde_steps

    def build(self, steps: int, iteration: int = 0, seed: int = 0) -> Tree:
        # None: one a member, which the tree of sampling builds without splitting its root
        noises = None if self.initial_noises == "each" else self.initial_noises
        branches, spans = self.branches(steps, iteration, seed), self.spans_at(steps)
        return build(
            branches, self.granularities, steps, self.grid, spans, self.split_steps(), noises
        )

    def transition(self, sigmas: torch.Tensor) -> Stochastic:
        return partial(SDES[self.sde], sigmas=sigmas, eta=self.eta)

    def group_problem(self, group_size: int, fewest: int) -> str | None:
        if self.initial_noises == "each":
            return None
        per_noise, rest = divmod(group_size, self.initial_noises)
        if rest or per_noise < fewest:
            return f"{group_size} members cannot share {self.initial_noises} initial noises evenly"
        at = self.split_steps()
        splits = 1 if at is None else len(at)
        if children_of_split(per_noise, splits) is None:
            return f"{per_noise} members of a noise cannot come of {splits} equal splits"
        return None


class _Windowed(_Branching):
    """A tree whose SDE steps may be a window that moves."""

    window: Window | None = Field(
        None, description="Which SDE steps are stochastic in an iteration; null: all."
    )

    def chosen(self, steps: int, iteration: int, seed: int) -> tuple[int, ...]:
        """Return the SDE steps of an iteration."""
        candidates = self.candidates(steps)
        return self.window.choose(candidates, iteration, seed) if self.window else candidates


class BranchPerStep(_Windowed):
    """Singular stochastic sampling (G²RPO): one branch per SDE step, with noise there alone."""

    branching: Literal["each"] = Field(description="One branch per SDE step.")
    spans: tuple[Count, ...] | None = Field(
        None,
        description="Grid steps that each of sde_steps takes at once (E-GRPO); null: one.",
    )

    @model_validator(mode="after")
    def _a_span_for_each(self):
        if self.spans is not None and (
            self.sde_steps == "all" or len(self.spans) != len(self.sde_steps)
        ):
            raise ValueError("spans: needs a number for each of sde_steps")
        return self

    def branches(
        self, steps: int, iteration: int = 0, seed: int = 0
    ) -> tuple[tuple[int, ...], ...]:
        return tuple((step,) for step in self.chosen(steps, iteration, seed))

    def spans_at(self, steps: int) -> dict[int, int]:
        candidates = self.candidates(steps)
        return dict(zip(candidates, self.spans or (1,) * len(candidates)))


class OneBranch(_Windowed):
    """One branch with noise at all of its SDE steps (DanceGRPO, MixGRPO, Flow-GRPO)."""

    branching: Literal["all"] = Field(description="One branch with all SDE steps.")

    def branches(
        self, steps: int, iteration: int = 0, seed: int = 0
    ) -> tuple[tuple[int, ...], ...]:
        return (self.chosen(steps, iteration, seed),)


class SplittingBranch(_Branching):
    """One branch whose states split more than once, each time into equally many (BranchGRPO)."""

    branching: Literal["splits"] = Field(
        description="One branch with all SDE steps, whose states split at some of them."
    )
    splits: tuple[int, ...] = Field(min_length=1, description="SDE steps at which states split.")
    split_noise: float = Field(
        1.0,
        gt=0,
        le=100,
        description="Factor of the noise at these steps, which the density leaves out.",
    )

    @model_validator(mode="after")
    def _some_of_the_sde_steps(self):
        rising = list(self.splits) == sorted(set(self.splits))
        if not rising or (self.sde_steps != "all" and not set(self.splits) <= set(self.sde_steps)):
            raise ValueError("splits: must be some of sde_steps, in rising order")
        return self

    def split_steps(self) -> tuple[int, ...]:
        return self.splits

    def scaled(self, noise: torch.Tensor, step: int) -> torch.Tensor:
        return noise * self.split_noise if step in self.splits else noise


class NoBranch(_Tree):
    """No SDE step: a solver samples every member from its own initial noise (DiffusionNFT, AWM)."""

    branching: Literal["none"] = Field(
        description="No SDE step; every member has its own initial noise."
    )
    initial_noises: Literal["each"] = Field("each", description="One per member.")
    solver: Literal["euler", "dpm2"] = Field(
        "euler", description="First order, or the second-order DPM-Solver++(2M)."
    )

    granularities: ClassVar[tuple[int, ...]] = (1,)


TreeSettings = Annotated[
    BranchPerStep | OneBranch | SplittingBranch | NoBranch, Field(discriminator="branching")
]
