"""Counts what a run costs, in units of one forward evaluation of the transformer (docs/explanation/cost.md)."""

from typing import NamedTuple

from g2rpo_core.config.profile import ResolvedRun
from g2rpo_core.sampling.tree import Tree

TRAINED, IMAGE = 3.0, 0.5  # of a trained state: its forward and backward; of an image: decoded and scored


class Cost(NamedTuple):
    """What something costs, each as a count."""

    evaluations: float
    """Forward evaluations in rollouts (NFE), with those of classifier-free guidance."""
    trained: float
    """States or noised images with a forward and backward."""
    images: float
    """Decoded and scored."""
    others: float
    """Velocities of the base or of an old policy."""
    guided: int = 1
    """Forward evaluations of a velocity."""

    @property
    def total(self) -> float:
        """Return the total compute, in forward evaluations."""
        return self.evaluations + self.guided * (TRAINED * self.trained + self.others) + IMAGE * self.images


def images_of(run: ResolvedRun, tree: Tree) -> int:
    """Count the images of one prompt that are decoded and scored: finished ones, and clean predictions where the credit needs them."""
    group = run.training.num_generations
    widths, ends = tree.widths(group), {node for pair in tree.transitions() for node in pair}
    predicted = sum(widths[node] for node in ends) if run.method.credit.needs_predictions else 0
    return len(tree.leaves) * len(tree.leaves[0]) * group + predicted


def cost_of(run: ResolvedRun, seed: int, iterations: int, evaluations: float, trained: float) -> Cost:
    """Return the cost of a run's first iterations from what its records count: forward evaluations in rollouts, and trained states."""
    tree, steps, prompts = run.method.tree, run.sampling.steps, run.training.prompts_per_iteration
    # The same without guidance, tree by tree, tells how many evaluations a velocity takes
    branches = [tree.branches(steps, iteration, seed) for iteration in range(iterations)]
    trees = {each: tree.build(steps, branches.index(each), seed) for each in dict.fromkeys(branches)}
    velocities = prompts * sum(trees[each].num_forward_evals(run.training.num_generations) for each in branches)
    images = prompts * sum(images_of(run, trees[each]) for each in branches)
    return Cost(evaluations, trained, images, run.method.objective.extra_forwards * trained, round(evaluations / velocities))
