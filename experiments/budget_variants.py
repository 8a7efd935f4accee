"""Rollouts at budgets that no method has a setting for, used by `experiments.budget`.

They have one SDE step per iteration and one prompt per process.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch

from g2rpo_core.algorithm.methods import Method
from g2rpo_core.data.embeddings import Conditioning, EmbeddingStore
from g2rpo_core.data.prompts import prompt_order
from g2rpo_core.models.policy import Policy
from g2rpo_core.rewards.spec import Reward
from g2rpo_core.rollout.rollout import Rollout, velocity_in_batches
from g2rpo_core.rollout.tree import build
from g2rpo_core.sampling.ode import ode
from g2rpo_core.sampling.schedule import tail
from g2rpo_core.sampling.settings import SamplingSettings
from g2rpo_core.training.experience import RolloutSampler, score_rollout
from g2rpo_core.training.settings import TrainingSettings


@dataclass(frozen=True)
class BudgetVariant:
    """Settings that depend on the iteration's SDE step, and how many members are finished.

    group_sizes, granularities: for SDE steps that differ from the run's settings; keep: how many of the group are finished at the
    only granularity and trained on, half with the lowest and half with the highest preview scores; None: all. A preview is the
    clean prediction right after the noise; it costs no forward evaluation that the tail does not need anyway.
    """

    group_sizes: Mapping[int, int] = field(default_factory=dict)
    granularities: Mapping[int, Sequence[int]] = field(default_factory=dict)
    keep: int | None = None

    def at(self, sde_step: int, method: Method, group: int) -> tuple[Method, int]:
        """The method and group size of an iteration with this SDE step."""
        granularities = tuple(self.granularities.get(sde_step, method.granularities))
        return method.model_copy(update={"granularities": granularities}), self.group_sizes.get(sde_step, group)

    def num_forward_evals(self, branches: Sequence[Sequence[int]], method: Method, steps: int, group: int) -> int:
        """NFE of one iteration with one prompt, as `Tree.num_forward_evals`."""
        if self == BudgetVariant():
            return build(branches, method.granularities, steps, method.grid).num_forward_evals(group)
        ((sde_step,),) = branches
        method, group = self.at(sde_step, method, group)
        if self.keep is None:
            return build(branches, method.granularities, steps, method.grid).num_forward_evals(group)
        (granularity,) = method.granularities
        previews = build(branches, previewing(method, steps).granularities, steps, method.grid).num_forward_evals(group)
        return previews + self.keep * (len(tail(steps, sde_step, granularity, method.grid)) - 1)


def previewing(method: Method, steps: int) -> Method:
    """The method with tails of one forward evaluation: from the state after the noise straight to sigma = 0."""
    return method.model_copy(update={"granularities": (steps,)})


class VariantSampler:
    """The rollouts of a budget variant, for `Trainer(sampler=...)`; arguments as in the Trainer."""

    def __init__(
        self,
        policy: Policy,
        method: Method,
        sampling: SamplingSettings,
        training: TrainingSettings,
        prompts: EmbeddingStore,
        rewards: Mapping[str, Reward],
        seed: int,
        variant: BudgetVariant,
    ):
        self.policy, self.method, self.sampling, self.training = policy, method, sampling, training
        self.prompts, self.rewards, self.seed, self.variant = prompts, rewards, seed, variant

    def __call__(
        self, conditioning: Conditioning, iteration: int, first: int = 0, before_call: Callable[[], None] = lambda: None
    ) -> Rollout:
        """As `RolloutSampler`, with the method and group size that the variant has at the iteration's SDE step."""
        steps = self.sampling.steps
        ((sde_step,),) = self.method.branches(steps, iteration, self.seed)
        method, group = self.variant.at(sde_step, self.method, self.training.num_generations)
        keep = self.variant.keep
        usual = method if keep is None else previewing(method, steps)
        sampler = RolloutSampler(self.policy, usual, self.sampling, group, self.seed)
        sampled = sampler(conditioning, iteration, first, before_call)
        if keep is None:
            return sampled
        return self._finish_extremes(sampled, keep, method, sampler, conditioning, iteration, before_call)

    @torch.no_grad()
    def _finish_extremes(
        self,
        previews: Rollout,
        keep: int,
        method: Method,
        sampler: RolloutSampler,
        conditioning: Conditioning,
        iteration: int,
        before_call: Callable[[], None],
    ) -> Rollout:
        """From a whole group that was rolled out to its previews, takes the `keep` most extreme members to the end."""
        (index,) = prompt_order(iteration, 1, len(self.prompts), self.seed)
        text = self.prompts.prompts[index].text
        scores = score_rollout(self.policy, self.rewards, previews, [text], self.sampling.decode_batch, iteration)
        weights = torch.tensor(list(self.training.rewards.values()))
        order = torch.einsum("r,r...->...", weights, scores).flatten().argsort()
        kept = torch.cat([order[: keep // 2], order[len(order) - (keep - keep // 2) :]])

        (transition,) = (each.members(kept) for each in previews.transitions)
        (granularity,) = method.granularities
        indices = tail(self.sampling.steps, transition.sde_step.step, granularity, method.grid)
        sigmas = [*map(sampler.sigma_of, indices), 0.0]
        latents, clean = transition.next_latents[0], previews.clean[0, 0, 0, kept]
        velocity = self.policy.sampling_velocity(conditioning)
        max_batch = self.policy.batch_size(self.sampling.batch_tokens, conditioning)
        prompt = torch.zeros(keep, dtype=torch.int64)
        v = (latents - clean) / sigmas[0]  # the preview's jump to 0, undone
        for sigma, following in pairwise(sigmas):
            if sigma != sigmas[0]:
                before_call()
                v = velocity_in_batches(velocity, latents, latents.new_full((keep,), sigma), prompt, max_batch)
            latents = ode(latents, v, sigma, following)
        num_forward_evals = previews.num_forward_evals + keep * (len(indices) - 1)
        return Rollout(latents[None, None, None], [transition], num_forward_evals, method.granularities)
