"""Measure, before training, what noise at each step does to the reward, and which tails agree."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from g2rpo_core.algorithm.advantage import correlation, standardized
from g2rpo_core.algorithm.methods import METHODS
from g2rpo_core.data.embeddings import EmbeddingStore
from g2rpo_core.models.policy import Policy
from g2rpo_core.rewards.spec import Reward
from g2rpo_core.sampling.schedule import sigma_at
from g2rpo_core.sampling.settings import SamplingSettings
from g2rpo_core.training.experience import RolloutSampler, score_rollout


@dataclass(frozen=True)
class Step:
    """One SDE step: means over prompts of the training reward, the weighted sum of rewards."""

    step: int
    sigma: float
    spread: float
    """Standard deviation within a group."""
    correlation: dict[int, float]
    """Granularity -> correlation of scores within a group with those of the finest tail."""
    gap: dict[int, float]
    """Granularity -> mean score minus the finest tail's."""
    evaluations: dict[int, int]
    """Granularity -> forward evaluations (NFE) of a group with this step and tail alone."""


@torch.no_grad()
def probe(
    policy: Policy,
    rewards: Mapping[str, Reward],
    weights: Mapping[str, float],
    store: EmbeddingStore,
    prompts: Iterable[int],
    sampling: SamplingSettings,
    granularities: tuple[int, ...],
    group: int,
    seed: int,
) -> list[Step]:
    """Measure every SDE step but the last, over prompts of the store, by their indices.

    A group's members share the initial noise and, at the step, get noise of their own (G²RPO's
    transition); everything else is deterministic. granularities: rising, the finest first; group:
    members.
    """
    steps = tuple(range(sampling.steps - 1))
    method = METHODS["g2rpo"].changed(tree={"sde_steps": steps, "granularities": granularities})
    sampler = RolloutSampler(policy, method, sampling, group, seed)
    weight = torch.tensor([float(weights[name]) for name in rewards]).view(-1, 1, 1, 1)
    per_prompt: list[torch.Tensor] = []  # [B, J, G]
    for index in prompts:
        sampled = sampler(policy.cut(store.conditioning([index])), iteration=0, first=index)
        scores = score_rollout(
            policy, rewards, sampled, [store.prompts[index].text], sampling.decode_batch, 0
        )
        per_prompt.append((weight * scores[:, 0].cpu()).sum(0))
    return _steps(torch.stack(per_prompt), steps, sampling, granularities, policy.forward_evals)


def _steps(
    scores: torch.Tensor,
    steps: Sequence[int],
    sampling: SamplingSettings,
    granularities: tuple[int, ...],
    forward_evals: int,
) -> list[Step]:
    """Summarize scores [P, B, J, G], one branch per step."""
    scaled, group = standardized(scores), scores.shape[-1]
    together = correlation(scaled, scaled[:, :, :1]).mean(0)  # [B, J]
    gaps = (scores - scores[:, :, :1]).mean((0, 3))
    method = lambda step, granularity: METHODS["g2rpo"].changed(
        tree={"sde_steps": (step,), "granularities": (granularity,)}
    )
    return [
        Step(
            step,
            sigma_at(step, sampling.steps, sampling.shift),
            scores[:, branch, 0].std(-1).mean().item(),
            {each: together[branch, index].item() for index, each in enumerate(granularities)},
            {each: gaps[branch, index].item() for index, each in enumerate(granularities)},
            {
                each: forward_evals
                * method(step, each).tree.build(sampling.steps).num_forward_evals(group)
                for each in granularities
            },
        )
        for branch, step in enumerate(steps)
    ]
