"""Savings that no method has a setting for, tried by `benchmarks.findings`; for one noisy step an iteration and one prompt a process."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch

from g2rpo_core.dynamics import ode
from g2rpo_core.embeddings import Conditioning
from g2rpo_core.methods import Method
from g2rpo_core.prompts import visits
from g2rpo_core.rollout import Rollout, evaluate
from g2rpo_core.schedule import tail
from g2rpo_core.trainer import Trainer
from g2rpo_core.tree import build


@dataclass(frozen=True)
class Savings:
    """What depends on the iteration's noisy step, and how many members are finished.

    group_sizes, granularities: of noisy steps that depart from the run's settings; keep: of the group, so many are finished at the
    only granularity and trained on, those whose preview scores lowest and highest (half each); None: all. A preview is the clean
    prediction right after the noise; it costs no evaluation that the tail does not need.
    """

    group_sizes: dict[int, int] = field(default_factory=dict)
    granularities: dict[int, Sequence[int]] = field(default_factory=dict)
    keep: int | None = None

    def at(self, step: int, method: Method, group: int) -> tuple[Method, int]:
        """The method and group size of an iteration that is noisy at `step`."""
        granularities = tuple(self.granularities.get(step, method.granularities))
        return method.model_copy(update={"granularities": granularities}), self.group_sizes.get(step, group)

    def evaluations(self, branches: Sequence[Sequence[int]], method: Method, steps: int, group: int) -> int:
        """Of one iteration with one prompt, as `Tree.evaluations`."""
        if self == Savings():
            return build(branches, method.granularities, steps, method.grid).evaluations(group)
        ((step,),) = branches
        method, group = self.at(step, method, group)
        if not self.keep:
            return build(branches, method.granularities, steps, method.grid).evaluations(group)
        (granularity,) = method.granularities
        previews = build(branches, previewing(method, steps).granularities, steps, method.grid).evaluations(group)
        return previews + self.keep * (len(tail(steps, step, granularity, method.grid)) - 1)


def previewing(method: Method, steps: int) -> Method:
    """The method with tails of one evaluation: from the state after the noise straight to sigma = 0."""
    return method.model_copy(update={"granularities": (steps,)})


class SparingTrainer(Trainer):
    """A trainer whose rollouts make `savings`."""

    def __init__(self, *arguments, savings: Savings, **settings):
        super().__init__(*arguments, **settings)
        self.savings, self.usual = savings, (self.method, self.training)

    def sample(self, conditioning: Conditioning, iteration: int, first: int = 0) -> Rollout:
        method, training = self.usual
        ((step,),) = method.branches(self.sampling.steps, iteration, self.seed)
        self.method, group = self.savings.at(step, method, training.group_size)
        self.training = training.model_copy(update={"group_size": group})
        return (
            self.finish_extremes(conditioning, iteration) if self.savings.keep else super().sample(conditioning, iteration, first)
        )

    @torch.no_grad()
    def finish_extremes(self, conditioning: Conditioning, iteration: int) -> Rollout:
        """Rolls the whole group out to its previews, and those that say most from there to the end."""
        method, steps, keep = self.method, self.sampling.steps, self.savings.keep
        self.method = previewing(method, steps)
        previews = super().sample(conditioning, iteration)
        self.method = method
        (index,) = visits(iteration, 1, len(self.prompts), self.seed)
        scores = self.score(previews, [self.prompts.prompts[index].text], iteration)
        weights = torch.tensor(list(self.training.rewards.values()))
        order = torch.einsum("r,r...->...", weights, scores).flatten().argsort()
        kept = torch.cat([order[: keep // 2], order[len(order) - (keep - keep // 2) :]])

        (taken,) = (one.members(kept) for one in previews.taken)
        (granularity,) = method.granularities
        indices = tail(steps, taken.decision.step, granularity, method.grid)
        levels = [*map(self.level, indices), 0.0]
        latents, clean = taken.next_latents[0], previews.clean[0, 0, 0, kept]
        velocity = self.policy.sampling_velocity(conditioning)
        prompt, max_batch = torch.zeros(keep, dtype=torch.int64), self.policy.batch_size(self.sampling.batch_tokens, conditioning)
        v = (latents - clean) / levels[0]  # the preview's jump to 0, undone
        for sigma, following in pairwise(levels):
            if sigma != levels[0]:
                v = evaluate(velocity, latents, latents.new_full((keep,), sigma), prompt, max_batch)
            latents = ode(latents, v, sigma, following)
        return Rollout(latents[None, None, None], [taken], previews.evaluations + keep * (len(indices) - 1))
