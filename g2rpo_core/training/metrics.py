"""The records of an iteration. docs/metrics.md lists every column."""

from collections.abc import Sequence

import torch

from g2rpo_core.algorithm.advantage import correlation, standardized

START = {"iteration": 0, "num_forward_evals": 0, "num_transitions": 0, "seconds": 0.0}  # before the first iteration


def reward_metrics(
    names: Sequence[str], rewards: torch.Tensor, advantages: torch.Tensor, granularities: tuple[int, ...], adv_clip_max: float
) -> dict[str, float]:
    """Metrics of this process's rewards [R, P, B, J, G] and of the advantages of all transitions, of any shape: means."""
    return {
        **{f"reward_{name}": score.mean().item() for name, score in zip(names, rewards)},
        **{f"reward_std_{name}": score.std(-1).mean().item() for name, score in zip(names, rewards)},
        **granularity_correlation(rewards, names, granularities),
        "adv_clip_share": (advantages.abs() >= adv_clip_max).float().mean().item(),
    }


def update_metrics(updates: list[dict[str, float]]) -> dict[str, float]:
    """Metrics of the iteration's optimizer steps: means, and the old-policy ratio error, which only the first step shows."""
    means = {key: sum(step[key] for step in updates) / len(updates) for key in ("loss", "kl", "grad_norm", "clip_ratio")}
    return {"old_policy_ratio_error": updates[0]["old_policy_ratio_error"], **means}


def granularity_correlation(rewards: torch.Tensor, names: Sequence[str], granularities: tuple[int, ...]) -> dict[str, float]:
    """Compares the scores of the same directions at each granularity with the finest (the paper's Fig. 3).

    rewards: [R, P, B, J, G]. `gap_<reward>_<granularity>`: its mean reward minus the finest's; `correlation_...`: the correlation
    with the finest's within a group, as a mean over groups. A group whose rewards are all equal counts as a correlation of 0.
    """
    scaled = standardized(rewards)
    metrics = {}
    for index, granularity in list(enumerate(granularities))[1:]:
        for name, raw, score in zip(names, rewards, scaled):
            together = correlation(score[:, :, index], score[:, :, 0])  # [P, B]
            metrics[f"gap_{name}_{granularity}"] = (raw[:, :, index] - raw[:, :, 0]).mean().item()
            metrics[f"correlation_{name}_{granularity}"] = together.mean().item()
    return metrics
