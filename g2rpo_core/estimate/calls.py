"""Compare the batch sizes of rollout and update at each SDE step.

Where both are equal, the ratio before the first update is 1. Where they differ, the GPU may choose
another kernel that rounds differently in bfloat16; how far that moves the ratio depends on the
step.
"""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from g2rpo_core.algorithm.objective import ObjectiveSettings
from g2rpo_core.config import Profile
from g2rpo_core.config.costs import parts_of_updates
from g2rpo_core.estimate.machines import Machines
from g2rpo_core.estimate.plan import Work
from g2rpo_core.sampling.rollout import shared_calls
from g2rpo_core.sampling.schedule import shifted_sigmas

DRAWS = 8  # of the steps that an iteration trains on
LARGEST = 4.5  # standard deviations of the largest ratio that a run sees


@dataclass(frozen=True)
class Calls:
    """Batch sizes at one SDE step, over all trees of a run."""

    step: int
    rollout: set[int]
    """Rows of the transformer's calls that sample it."""
    update: set[int]
    """Rows of the calls that train on it."""
    tolerated: float
    """Relative difference of both velocities at which |ratio - 1| leaves the clip range."""


def calls_of(profile: Profile, name: str, machines: Machines) -> list[Calls]:
    """Return the calls at each SDE step that a method may train on; [] without a ratio."""
    work = Work(profile, name, machines, None)
    objective = work.method.objective
    if not isinstance(objective, ObjectiveSettings):
        return []
    found: dict[int, tuple[set[int], set[int]]] = {}
    for tree in {id(tree): tree for tree in work.trees}.values():
        rows: dict[int, set[int]] = {}
        for together in shared_calls(tree, work.prompts, work.group, work.at_once["rollout"]):
            owners: np.ndarray = np.repeat(list(together), list(together.values()))
            parts = np.array_split(owners, -(-len(owners) // work.at_once["rollout"]))
            rows |= {node: {len(part) for part in parts if node in part} for node in together}
        ends, widths = tree.transitions(), tree.widths(work.group)
        for draw in range(DRAWS):
            chosen = objective.draw_steps(len(ends), random.Random(draw))
            for index, sizes in _updates(
                work, [(widths[ends[one][0]], widths[ends[one][1]]) for one in chosen]
            ):
                sampled, trained = found.setdefault(
                    tree.sde_steps[chosen[index]].step, (set(), set())
                )
                sampled |= rows[ends[chosen[index]][0]]
                trained |= sizes
    return [Calls(step, *found[step], tolerated(work, step)) for step in sorted(found)]


def describe_calls(calls: Sequence[Calls]) -> str:
    """Say the batch sizes over all SDE steps, and which velocity error matters if they differ."""
    rows = lambda sets: " or ".join(map(str, sorted(set().union(*sets))))
    sampled, trained = rows(one.rollout for one in calls), rows(one.update for one in calls)
    if all(one.rollout == one.update for one in calls):
        ends = "equal at each step, so ratios start at 1"
    else:
        ends = "|ratio - 1| leaves the clip range at a relative velocity error of "
        ends += f"{min(one.tolerated for one in calls):.2%}"
    return f"latents per call at SDE steps: rollout {sampled}, update {trained}; {ends}"


def _updates(work: Work, transitions: list[tuple[int, int]]) -> list[tuple[int, set[int]]]:
    """Return each transition's index with the rows of the calls that train it, as `split` does.

    transitions: (states, next states) of one prompt.
    """
    updates = work.method.objective.updates_per_rollout
    # The transitions of each optimizer step
    if updates == "step":
        steps = [[one] for one in enumerate(transitions)]
    else:
        steps = [
            list(enumerate(part))
            for part in parts_of_updates(transitions, 1 if updates == "iteration" else updates)
        ]
    # The calls of each: states with equally many next states go together
    found: list[tuple[int, set[int]]] = []
    for step in steps:
        for members in {after // before for _, (before, after) in step}:
            same = [
                (index, work.prompts * before)
                for index, (before, after) in step
                if after // before == members
            ]
            trained: np.ndarray = np.repeat(
                [index for index, _ in same], [rows for _, rows in same]
            )
            calls = [
                trained[start : start + work.at_once["update"]]
                for start in range(0, len(trained), work.at_once["update"])
            ]
            found += [(index, {len(call) for call in calls if index in call}) for index, _ in same]
    return found


def tolerated(work: Work, step: int) -> float:
    """Return the relative error e of a velocity at which |ratio - 1| reaches the clip range.

    The largest |ratio - 1| of a run is about 4.5 g e / sqrt(n) + (g e)^2 / 2; g: the velocity's
    weight in the transition's mean, in standard deviations; n: elements of a latent.
    Classifier-free guidance adds the errors of both evaluations.
    """
    sigmas = shifted_sigmas(work.sampling.steps, work.sampling.shift)
    transition = work.method.tree.transition(sigmas)
    assert transition is not None  # of a method with a ratio
    zero, one = torch.zeros(1, 1), torch.ones(1, 1)
    moved = transition(zero, one, step=step)
    weight = abs(float((moved.mean - transition(zero, zero, step=step).mean) / moved.std))
    if work.forward_evals == 2:
        weight *= math.hypot(work.sampling.guidance, work.sampling.guidance - 1)
    # A token has 2 x 2 latents
    elements = work.tokens[0] * math.prod(work.base.latent_shape(work.shape.vae, 2, 2))
    linear = LARGEST / math.sqrt(elements)
    return (math.sqrt(linear**2 + 2 * work.training.clip_range) - linear) / weight
