"""Every method as a value: what is sampled, which reward belongs to what, and what is trained on.

All differences between the methods are here and nowhere else: one rollout engine samples any of
them, and one trainer trains on the result. A new method is one line in SPECS.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

import torch
from pydantic import Discriminator, Field, Tag, model_validator

from g2rpo_core.algorithm.batch import Objective
from g2rpo_core.algorithm.credit import CreditAssignment, CreditSettings, GainCredit, ImageCredit
from g2rpo_core.algorithm.matching import MatchingSettings, OldPolicy, VelocityMatching
from g2rpo_core.algorithm.objective import ObjectiveSettings, PolicyGradient
from g2rpo_core.algorithm.tree import (
    BranchPerStep,
    NoBranch,
    OneBranch,
    SplittingBranch,
    TreeSettings,
    Window,
)
from g2rpo_core.foundation.settings import Settings

# Part of a method -> the key that names its kind, and its kinds
KINDS: dict[str, tuple[str, dict[str, type[Settings]]]] = {
    "tree": (
        "branching",
        {"each": BranchPerStep, "all": OneBranch, "splits": SplittingBranch, "none": NoBranch},
    ),
    "credit": ("reward", {"image": ImageCredit, "gain": GainCredit}),
    "objective": ("trains", {"transitions": ObjectiveSettings, "noised": MatchingSettings}),
}


def _kind(value: object) -> object:
    """Return what some objective settings train on; without `trains` it is transitions."""
    return (
        value.get("trains", "transitions")
        if isinstance(value, Mapping)
        else getattr(value, "trains", "transitions")
    )


AnyObjective = Annotated[
    Annotated[ObjectiveSettings, Tag("transitions")] | Annotated[MatchingSettings, Tag("noised")],
    Discriminator(_kind),
]


class Method(Settings):
    """A method in three parts; those of each published method are in METHODS."""

    tree: TreeSettings = Field(
        description="What is sampled: where noise is added, and how samples are finished."
    )
    credit: CreditSettings = Field(
        ImageCredit(),
        description="Which reward belongs to a transition, and what it is compared with.",
    )
    objective: AnyObjective = Field(
        ObjectiveSettings(),
        description="What is trained on, transitions or noised clean latents, and by which loss.",
    )

    @model_validator(mode="after")
    def _parts_fit_together(self):
        noised = isinstance(self.objective, MatchingSettings)
        if isinstance(self.tree, NoBranch) and not noised:
            raise ValueError(
                "tree.branching: none has no transitions to train on: "
                "objective.trains must be noised"
            )
        if isinstance(self.credit, GainCredit) and noised:
            raise ValueError(
                "credit.reward: gain belongs to transitions: objective.trains must be transitions"
            )
        if isinstance(self.credit, GainCredit) and len(self.tree.granularities) > 1:
            raise ValueError(
                "credit.reward: gain has no tails to compare: tree.granularities must be one"
            )
        if self.credit.compared == "noise" and self.tree.initial_noises == "each":
            raise ValueError(
                "credit.compared: noise needs several members of an initial noise, "
                "and tree.initial_noises: each leaves one"
            )
        if isinstance(self.tree, SplittingBranch) and isinstance(self.objective, ObjectiveSettings):
            shared = "members share states until they have split"
            updates = self.objective.updates_per_rollout
            if self.objective.timesteps_of == "member":
                raise ValueError(f"objective.timesteps_of: {shared}: must be group")
            if isinstance(updates, int) and updates > 1:
                raise ValueError(
                    f"objective.updates_per_rollout: {shared}: must be iteration, step or 1"
                )
        return self

    @property
    def groups(self) -> int:
        """Return into how many groups, each compared by itself, a prompt's members are divided."""
        noises = self.tree.initial_noises
        return noises if self.credit.compared == "noise" and isinstance(noises, int) else 1

    def group_problem(self, group_size: int) -> str | None:
        """Say why a group of this size cannot be sampled; None if it can."""
        return self.tree.group_problem(
            group_size, fewest=2 if self.credit.compared == "noise" else 1
        )

    def num_updates(self, steps: int) -> int:
        """Return the optimizer steps of an iteration, for T = steps."""
        return self.objective.num_updates(sum(map(len, self.tree.branches(steps))))

    def changes(self, **parts: Mapping[str, object]) -> dict[str, object]:
        """Return this method's settings with `parts` replaced, as JSON values not checked yet.

        Where a part changes its kind, settings that the new kind does not have are left out.
        """
        # exclude_unset: a default that the profile does not name may become another one
        found: dict = self.model_dump(mode="json", exclude_unset=True)
        for name, new in parts.items():
            if not isinstance(new, Mapping):
                return {**found, name: new}
            old = found.get(name, {})
            if name in KINDS:
                key, kinds = KINDS[name]
                kind = kinds.get(str(new.get(key, getattr(getattr(self, name), key))))
                old = {
                    each: value
                    for each, value in old.items()
                    if kind is None or each in kind.model_fields
                }
            found[name] = {**old, **new}
        return found

    def changed(self, **parts: Mapping[str, object]) -> "Method":
        """Return this method with some settings replaced, such as `tree={"eta": 0.5}`.

        ValidationError if they do not fit.
        """
        return type(self).model_validate(self.changes(**parts), strict=False)


def build_objective(
    method: Method, credit: CreditAssignment, sigmas: torch.Tensor, clip_range: float
) -> Objective:
    """Build the objective of a run on the sampler's sigmas [T+1]."""
    if isinstance(method.objective, MatchingSettings):
        return VelocityMatching(method.objective, credit, sigmas)
    # All steps that may be drawn, not those of one iteration: weights by noise are means over them
    transition, spans = method.tree.transition(sigmas), method.tree.spans_at(len(sigmas) - 1)
    if transition is None:  # Method refuses it
        raise ValueError("a tree without SDE steps has no transitions to train on")
    return PolicyGradient(method.objective, credit, transition, sigmas, clip_range, spans)


@dataclass(frozen=True)
class MethodSpec:
    """A published method."""

    name: str
    """In profiles."""
    label: str
    """In reports."""
    settings: Method
    """As published."""
    clip_range: float | None = None
    """As published, in place of `training.clip_range`; None: the section's value holds."""


# Granular-GRPO, arXiv 2510.01982, Table 3: eta, M (16...9 in its count), Lambda; one step per
# iteration as in its newest code
_G2RPO = Method(
    tree=BranchPerStep(
        branching="each", sde_steps=tuple(range(8)), sde="flow", eta=0.7, granularities=(1, 2, 3)
    )
)
# MixGRPO, arXiv 2507.21802 (T = 25): a window of 4 that moves by 1 every 25 iterations; 12 members
# in steps of 3
_MIX = Method(
    tree=OneBranch(
        branching="all",
        sde_steps="all",
        sde="flow",
        eta=0.7,
        window=Window(size=4, order="progressive", every=25),
    ),
    objective=ObjectiveSettings(updates_per_rollout=4),
)
# its Flash form: the steps after the window shortened to 0.4 of them, by a second-order solver
_FLASH = {
    "grid": "even",
    "granularities": (3,),
    "solver": "dpm2",
    "window": {"size": 4, "order": "progressive", "every": 20},
}
# Flow-GRPO, arXiv 2505.05470: noise at every step, eta 0.7, two updates; the KL weight of its
# PickScore runs belongs to the exact KL, as its code had it until commit 2d76907, which took
# sqrt(-dt) out of the deviation in the KL and multiplied the weight by ten
_FLOW = Method(
    tree=OneBranch(branching="all", sde_steps="all", sde="flow", eta=0.7),
    credit=ImageCredit(reward_aggr="rewards"),
    objective=ObjectiveSettings(updates_per_rollout=2, kl_coef=0.001),
)
# Flow-GRPO-Fast, its first form (pickscore_sd3_fast): noise at two neighbouring steps, the first of
# 0...T/2, and no KL
_FAST: dict[str, dict] = {
    "tree": {"sde_steps": tuple(range(10)), "window": {"size": 2, "order": "random"}, "eta": 0.8},
    "objective": {"kl_coef": 0.0},
}
# DanceGRPO, arXiv 2505.07818: eta 0.3, a random 60 % of the steps is trained on, 12 members in
# steps of 4
_DANCE = Method(
    tree=OneBranch(branching="all", sde_steps="all", sde="dance", eta=0.3),
    objective=ObjectiveSettings(timestep_fraction=0.6, updates_per_rollout=3),
)

# the form that reached the full setting's reward with a fifth of its forward evaluations on the
# first tiny task: one SDE step an iteration, from the later part of the first half, and coarse
# tails alone
_COARSE = {
    "sde_steps": tuple(range(3, 8)),
    "window": {"size": 1, "order": "scattered"},
    "granularities": (3,),
}
# BranchGRPO, arXiv 2509.06040; its script for FLUX (T = 20, G = 16): every state splits in two at
# four steps, with four times the noise
_BRANCH = Method(
    tree=SplittingBranch(
        branching="splits",
        sde_steps="all",
        sde="dance",
        eta=0.3,
        splits=(0, 3, 6, 9),
        split_noise=4.0,
    )
)
# Flow-DPPO, arXiv 2606.11025; its configuration for Stable Diffusion 3.5 (T = 10, G = 16): three
# steps of the first half, two updates
_DPPO = Method(
    tree=OneBranch(
        branching="all",
        sde_steps=tuple(range(5)),
        window=Window(size=3, order="scattered"),
        sde="flow",
        eta=0.7,
        initial_noises="each",
    ),
    credit=ImageCredit(deviation="batch", reward_aggr="rewards"),
    objective=ObjectiveSettings(updates_per_rollout=2, kl_mask=1e-5),
)
# TempFlow-GRPO, arXiv 2508.04324, its configuration for FLUX (T = 10, G = 24): one SDE step a
# branch, at any step, four initial noises
_TEMPFLOW = Method(
    tree=BranchPerStep(branching="each", sde_steps="all", sde="flow", eta=0.9, initial_noises=4),
    credit=ImageCredit(compared="noise", reward_aggr="rewards"),
    objective=ObjectiveSettings(step_weights="noise", updates_per_rollout=2, kl_coef=0.004),
)
# E-GRPO, arXiv 2601.00423: each of the first 8 of T = 16 steps goes on until its entropy, 2 pi e
# times the variance of its noise, is over 2.2 (Eq. 9-11 in our reading); Lambda and one update a
# step are its code's
_E_GRPO = Method(
    tree=BranchPerStep(
        branching="each",
        sde_steps=tuple(range(8)),
        spans=(1, 1, 1, 1, 1, 2, 2, 2),
        sde="flow",
        eta=0.7,
        granularities=(1, 2),
    ),
    objective=ObjectiveSettings(updates_per_rollout="step"),
)
# GRPO-Guard, arXiv 2510.22319, its PickScore runs: Flow-GRPO without KL, with ratios whose spread
# does not depend on the step
_GUARD = {"ratio": "normalized", "kl_coef": 0.0}

# The forward-process family (`matching.py`): any solver, no transition; their papers' Stable
# Diffusion 3.5 runs, T = 10
_ODE = NoBranch(branching="none", solver="dpm2")
_OF_BATCH = ImageCredit(deviation="batch")
_OF_SUM = ImageCredit(deviation="batch", reward_aggr="rewards")  # of code that began as Flow-GRPO's
# DiffusionNFT, arXiv 2509.16117: all sampler times but the last, a slow policy that samples
_NFT = Method(
    tree=_ODE,
    credit=_OF_SUM,
    objective=MatchingSettings(
        trains="noised",
        times=9,
        share=(0.0, 0.99),
        loss="branches",
        trust=1.0,
        factor=5.0,
        advantage_scale=0.2,
        advantage_limit=1.0,
        old=OldPolicy(),
        kl_coef=1e-4,
    ),
)
# AWM, arXiv 2509.25050: the likelihood's surrogate, held back by an average of the weights; at its
# one update its ratio is 1
_AWM = Method(
    tree=_ODE,
    credit=_OF_SUM,
    objective=MatchingSettings(
        trains="noised",
        times=6,
        draw="strata",
        share=(0.05, 0.9),
        signed=True,
        weight="huber",
        advantage_scale=0.2,
        advantage_limit=1.0,
        old=OldPolicy(hold=0.3, samples=False),
        old_coef=1.0,
        kl_coef=1e-4,
    ),
)
# AdvantageFlow, arXiv 2605.26013, as arXiv 2609.37670 writes it; its number of times is not known
_ADVANTAGE_FLOW = Method(
    tree=_ODE,
    credit=_OF_BATCH,
    objective=MatchingSettings(
        trains="noised",
        times=2,
        share=(0.0, 0.99),
        signed=True,
        trust=1.1,
        weight="error",
        advantage_limit=1.0,
        kl_coef=1e-3,
        kl_weighted=True,
    ),
)
# RVM, arXiv 2608.23664: one noising an image at a uniform time
_RVM = Method(
    tree=_ODE,
    credit=_OF_BATCH,
    objective=MatchingSettings(
        trains="noised", draw="uniform", signed=True, trust=1e-4, factor=0.5, advantage_scale=0.1
    ),
)
# RAM, arXiv 2605.10759: the target is the base's velocity plus m A (v* - v_old); late times have
# more weight
_RAM = Method(
    tree=_ODE,
    credit=_OF_BATCH,
    objective=MatchingSettings(
        trains="noised",
        times=8,
        draw="linear",
        trust=1.0,
        anchor="base",
        advantage_scale=100.0,
        old=OldPolicy(ramp=0.01, hold=0.9),
    ),
)
# Ours: advantage-weighted matching with one noising an image, which the whole group shares; of
# images sampled apart, or of the leaves of a tree. Without a slow policy, at one update an
# iteration, nothing of DiffusionNFT's loss is left but its weight (matching.py)
_SHARED = {"times": 1, "share": (0.0, 1.0), "shared": True, "old": None, "kl_coef": 0.0}

SPECS = (
    MethodSpec("g2rpo", "G²RPO", _G2RPO),
    # without multi-granularity advantage integration (Table 1)
    MethodSpec("g2rpo_no_mgai", "G²RPO w/o MGAI", _G2RPO.changed(tree={"granularities": (1,)})),
    MethodSpec("dance_grpo", "DanceGRPO", _DANCE),
    MethodSpec("mix_grpo", "MixGRPO", _MIX),
    MethodSpec("mix_grpo_flash", "MixGRPO-Flash", _MIX.changed(tree=_FLASH)),
    MethodSpec("flow_grpo", "Flow-GRPO", _FLOW),
    MethodSpec("flow_grpo_fast", "Flow-GRPO-Fast", _FLOW.changed(**_FAST), clip_range=1e-5),
    MethodSpec("grpo_guard", "GRPO-Guard", _FLOW.changed(objective=_GUARD), clip_range=4e-6),
    MethodSpec("g2rpo_coarse", "G²RPO, coarse tails", _G2RPO.changed(tree=_COARSE)),
    MethodSpec("branch_grpo", "BranchGRPO", _BRANCH, clip_range=1e-3),
    MethodSpec("e_grpo", "E-GRPO", _E_GRPO),
    MethodSpec("tempflow_grpo", "TempFlow-GRPO", _TEMPFLOW),
    MethodSpec("flow_dppo", "Flow-DPPO", _DPPO),
    # Stepwise-Flow-GRPO, arXiv 2603.28718: Flow-GRPO, but every step has the gain of the clean
    # prediction as its reward
    MethodSpec(
        "stepwise_flow_grpo", "Stepwise-Flow-GRPO", _FLOW.changed(credit={"reward": "gain"})
    ),
    MethodSpec("diffusion_nft", "DiffusionNFT", _NFT),
    MethodSpec("awm", "AWM", _AWM),
    MethodSpec("advantage_flow", "AdvantageFlow", _ADVANTAGE_FLOW),
    MethodSpec("rvm", "RVM", _RVM),
    MethodSpec("ram", "RAM", _RAM),
    MethodSpec("nft_shared", "Matching, common noise", _NFT.changed(objective=_SHARED)),
    MethodSpec(
        "nft_leaves",
        "Matching on G²RPO's leaves",
        _NFT.changed(
            tree=_G2RPO.changed(tree=_COARSE).tree.model_dump(mode="json"), objective=_SHARED
        ),
    ),
)
METHODS: dict[str, Method] = {spec.name: spec.settings for spec in SPECS}
LABELS: dict[str, str] = {spec.name: spec.label for spec in SPECS}
CLIP_RANGES: dict[str, float] = {spec.name: spec.clip_range for spec in SPECS if spec.clip_range}
