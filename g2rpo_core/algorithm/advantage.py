"""Turns rewards into advantages, per reward and granularity, and sums them (paper Eq. 4, 8 and 11)."""

from collections.abc import Sequence

import torch

OF_BATCH = 1e-4  # added to the standard deviation of a batch, as in flow_grpo's `PerPromptStatTracker`


def standardized(rewards: torch.Tensor, deviation: torch.Tensor | None = None) -> torch.Tensor:
    """Return (r - mean) / (std + 1e-8) over the last axis, std with ddof 1 (Eq. 4); float32, shape of rewards.

    A group whose rewards are all equal carries no signal: it gets 0, not rounding noise divided by 1e-8.
    deviation: of all rewards together, in place of each group's own; broadcasts against the rewards.
    """
    rewards = rewards.float()
    divisor = rewards.std(-1, keepdim=True) + 1e-8 if deviation is None else deviation + OF_BATCH
    scaled = (rewards - rewards.mean(-1, keepdim=True)) / divisor
    all_equal = (rewards == rewards[..., :1]).all(-1, keepdim=True)
    return torch.where(all_equal, 0.0, scaled)


def correlation(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Return Pearson's correlation within each group [..., G] of two standardized tensors: [...]; 0 where all of either are equal."""
    return (first * second).sum(-1) / (first.shape[-1] - 1)


def group_advantages(
    rewards: torch.Tensor, weights: Sequence[float] | None = None, clip: float = 5.0, deviation: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the advantage of every member at every SDE step: float32 [K, G], within [-clip, clip].

    rewards: [R, J, K, G] for R rewards, J granularities, K SDE steps (or prompts x steps) and G >= 2 members, all
    finite. weights: one for each reward, 1 if None. Each group of G is standardized by itself (Eq. 8), then summed over
    granularities (Eq. 11) and weighted rewards, then clamped. deviation: [R, J, 1, 1] as of `standardized`.

    Raises ValueError on another shape, fewer than two members, or a reward that is not finite.
    """
    if rewards.ndim != 4 or rewards.shape[-1] < 2:
        raise ValueError(f"rewards must be [R, J, K, G] with G >= 2, got {tuple(rewards.shape)}")
    if not rewards.isfinite().all():
        raise ValueError(f"{int((~rewards.isfinite()).sum())} of {rewards.numel()} rewards are not finite")
    weight = torch.ones(len(rewards)) if weights is None else torch.tensor(weights, dtype=torch.float32)
    if weight.shape != rewards.shape[:1]:
        raise ValueError(f"{len(rewards)} rewards need as many weights, got {len(weight)}")
    mixed = torch.einsum("r,rjkg->kg", weight.to(rewards.device), standardized(rewards, deviation))
    return mixed.clamp(-clip, clip)


def mean_of_shared_states(values: torch.Tensor, states: int) -> torch.Tensor:
    """Return the mean over the members [..., G] of each of so many shared states, whose members stand side by side: [..., states]."""
    return values.unflatten(-1, (states, values.shape[-1] // states)).mean(-1)


def branch_advantages(
    rewards: torch.Tensor, weights: Sequence[float], clip: float, groups: int = 1, deviation: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the advantages [P, B, W] of rewards [R, P, B, J, W].

    groups: into which a prompt's branch is divided, whose members stand side by side;
    deviation: [R, J, 1, 1] as of `standardized`. A group of one has an advantage of 0.
    """
    _, prompts, branches, _, width = rewards.shape
    if width <= groups:
        return rewards.new_zeros(prompts, branches, width)
    grouped = rewards.unflatten(-1, (groups, width // groups))  # [R, P, B, J, groups, -1]
    compared = grouped.permute(0, 3, 1, 2, 4, 5).flatten(2, 4)  # [R, J, P * B * groups, -1]
    return group_advantages(compared, weights, clip, deviation).view(prompts, branches, width)
