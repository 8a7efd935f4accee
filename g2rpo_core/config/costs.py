"""Counts what a run costs in forward evaluations of the transformer (docs/explanation/cost.md)."""

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import pandas as pd

from g2rpo_core.algorithm.batch import parts_of_group
from g2rpo_core.config.profile import ResolvedRun
from g2rpo_core.sampling.rollout import whole_states
from g2rpo_core.sampling.tree import Tree

Count: TypeAlias = float | pd.Series
TRAINED = 3.0  # of a trained state: its forward and backward
IMAGE = 0.5  # of an image: decoded and scored


class Cost(NamedTuple):
    """What something costs, each as a count or a column of counts."""

    evaluations: Count
    """Forward evaluations in rollouts (NFE), with those of classifier-free guidance."""
    trained: Count
    """States or noised images with a forward and backward."""
    images: Count
    """Decoded and scored."""
    others: Count
    """Velocities of the base or of an old policy."""
    guided: int = 1
    """Forward evaluations of a velocity."""

    @property
    def total(self) -> Count:
        """Return the total compute, in forward evaluations."""
        return (
            self.evaluations
            + self.guided * (TRAINED * self.trained + self.others)
            + IMAGE * self.images
        )


def images_of(run: ResolvedRun, tree: Tree) -> int:
    """Count a prompt's scored images: finished ones, and the clean predictions of the credit."""
    group = run.training.num_generations
    widths, ends = tree.widths(group), {node for pair in tree.transitions() for node in pair}
    predicted = sum(widths[node] for node in ends) if run.method.credit.needs_predictions else 0
    return len(tree.leaves) * len(tree.leaves[0]) * group + predicted


def cost_of_prompt(run: ResolvedRun) -> Cost:
    """Return the cost of an iteration's prompt, the first if they differ; without guidance."""
    group, objective = run.training.num_generations, run.method.objective
    tree = run.method.tree.build(run.sampling.steps)
    updates = objective.updates_per_rollout if isinstance(objective.updates_per_rollout, int) else 1
    trained = sum(
        states
        for part in parts_of_updates(objective.trained_rows(tree, group), updates)
        for states, _ in part
    )
    return Cost(
        tree.num_forward_evals(group),
        trained,
        images_of(run, tree),
        objective.extra_forwards * trained,
    )


def compute_of(run: ResolvedRun) -> float:
    """Return the total compute of a run in forward evaluations, without those of guidance."""
    training = run.training
    return cost_of_prompt(run).total * training.prompts_per_iteration * training.iterations


def parts_of_updates(
    transitions: Sequence[tuple[int, int]], updates: int
) -> list[list[tuple[int, int]]]:
    """Return the (states, next states) that each optimizer step trains on.

    States are kept as in `SampledTransition.members`.
    """

    def states(part: slice, before: int, after: int) -> int:
        kept = slice(0, 1) if before == 1 else whole_states(part, after // before) or part
        return kept.stop - kept.start

    parts = zip(*(parts_of_group(after, updates) for _, after in transitions))
    return [
        [(states(each, *one), each.stop - each.start) for each, one in zip(part, transitions)]
        for part in parts
    ]


def cost_of(run: ResolvedRun, seed: int, records: pd.DataFrame) -> Cost:
    """Return the cost of a run until each of its training records; each count is a column.

    Where the trained states of a record are not known (NaN), they are in proportion to the last
    one's.
    """
    tree, steps, prompts = run.method.tree, run.sampling.steps, run.training.prompts_per_iteration
    iterations, last = records.iteration.astype(float), records.iloc[-1]
    trained = records.num_transitions.astype(float).fillna(
        iterations * last.num_transitions / max(1, last.iteration)
    )
    # The same without guidance, tree by tree, tells how many evaluations a velocity takes
    branches = [tree.branches(steps, iteration, seed) for iteration in range(int(last.iteration))]
    trees = {
        each: tree.build(steps, branches.index(each), seed) for each in dict.fromkeys(branches)
    }
    velocities = prompts * sum(
        trees[each].num_forward_evals(run.training.num_generations) for each in branches
    )
    guided = max(1, round(last.num_forward_evals / velocities)) if velocities else 1
    images = prompts * images_of(run, tree.build(steps, 0, seed)) * iterations
    return Cost(
        records.num_forward_evals,
        trained,
        images,
        run.method.objective.extra_forwards * trained,
        guided,
    )
