"""Advantages: standardizes rewards per reward and granularity, and sums them (Eq. 4, 8, 11)."""

from collections.abc import Sequence

import torch

# Added to the standard deviation of a batch, as in flow_grpo's `PerPromptStatTracker`
OF_BATCH = 1e-4
# Spread of a group, over the size of its rewards, up to which they are equal. Rewards come as
# float32, whatever computed them: equal images in two calls of a scorer, whose sums a library
# orders by the size of the batch, differ in their last bits, by up to 7 eps of float32 in calls of
# 1 to 16 images by the CLIP-like scorers of profile `tiny`. Eight are 8 to 16 last places.
EQUAL = 8 * torch.finfo(torch.float32).eps


def without_spread(rewards: torch.Tensor, size: torch.Tensor | None = None) -> torch.Tensor:
    """Tell which groups [..., G] have rewards that differ only in their last bits: [..., 1] bool.

    size: magnitude of the numbers that the rewards were computed from, if it is larger than theirs,
    as for differences; shape of rewards.
    """
    rewards = rewards.double()
    largest = (rewards if size is None else size.double()).abs().amax(-1, keepdim=True)
    return rewards.amax(-1, keepdim=True) - rewards.amin(-1, keepdim=True) <= EQUAL * largest


def standardized(
    rewards: torch.Tensor, deviation: torch.Tensor | None = None, size: torch.Tensor | None = None
) -> torch.Tensor:
    """Return (r - mean) / (std + 1e-8) over the last axis (Eq. 4): float32, shape of rewards.

    Computed in float64, std with ddof 1. A group `without_spread` carries no signal: it gets 0, not
    rounding divided by rounding. deviation: one for all rewards, instead of each group's own;
    broadcasts against the rewards. size: as in `without_spread`.
    """
    # float64: the mean of equal rewards is not that reward in float32, and 0 / 0 becomes a signal
    values = rewards.double()
    divisor = (
        values.std(-1, keepdim=True) + 1e-8 if deviation is None else deviation.double() + OF_BATCH
    )
    scaled = (values - values.mean(-1, keepdim=True)) / divisor
    return torch.where(without_spread(values, size), 0.0, scaled).float()


def correlation(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Return the correlation within each group [..., G] of two standardized tensors: [...].

    Pearson's; 0 where all values of either are equal.
    """
    return (first * second).sum(-1) / (first.shape[-1] - 1)


def group_advantages(
    rewards: torch.Tensor,
    weights: Sequence[float] | None = None,
    clip: float = 5.0,
    deviation: torch.Tensor | None = None,
    size: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the advantage of every member at every SDE step: float32 [K, G], within [-clip, clip].

    rewards: [R, J, K, G] for R rewards, J granularities, K SDE steps (or prompts x steps) and G >=
    2 members, all finite. weights: one for each reward, 1 if None. Each group of G is standardized
    by itself (Eq. 8), then summed over granularities (Eq. 11) and weighted rewards, then clamped.
    deviation: [R, J, 1, 1], and size: [R, J, K, G], as in `standardized`.

    Raises ValueError on another shape, fewer than two members, or a reward that is not finite.
    """
    if rewards.ndim != 4 or rewards.shape[-1] < 2:
        raise ValueError(f"rewards must be [R, J, K, G] with G >= 2, got {tuple(rewards.shape)}")
    if not rewards.isfinite().all():
        raise ValueError(
            f"{int((~rewards.isfinite()).sum())} of {rewards.numel()} rewards are not finite"
        )
    weight = (
        torch.ones(len(rewards)) if weights is None else torch.tensor(weights, dtype=torch.float32)
    )
    if weight.shape != rewards.shape[:1]:
        raise ValueError(f"{len(rewards)} rewards need as many weights, got {len(weight)}")
    # A sum, not a mean, over granularities (Eq. 11): the clamp below is on what they add up to
    mixed = torch.einsum(
        "r,rjkg->kg", weight.to(rewards.device), standardized(rewards, deviation, size)
    )
    return mixed.clamp(-clip, clip)


def mean_of_shared_states(values: torch.Tensor, states: int) -> torch.Tensor:
    """Average the members [..., G] of each shared state, which are adjacent: [..., states]."""
    return values.unflatten(-1, (states, values.shape[-1] // states)).mean(-1)


def branch_advantages(
    rewards: torch.Tensor,
    weights: Sequence[float],
    clip: float,
    groups: int = 1,
    deviation: torch.Tensor | None = None,
    size: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the advantages [P, B, W] of rewards [R, P, B, J, W].

    groups: parts of a prompt's branch that are compared by themselves, with adjacent members;
    deviation: [R, J, 1, 1], and size: shape of rewards, as in `standardized`. A group of one has an
    advantage of 0.
    """
    _, prompts, branches, _, width = rewards.shape
    # Standardizing one value would divide rounding by rounding
    if width <= groups:
        return rewards.new_zeros(prompts, branches, width)

    def compared(values: torch.Tensor) -> torch.Tensor:  # [R, J, P * B * groups, -1]
        return (
            values.unflatten(-1, (groups, width // groups)).permute(0, 3, 1, 2, 4, 5).flatten(2, 4)
        )

    sizes = None if size is None else compared(size)
    return group_advantages(compared(rewards), weights, clip, deviation, sizes).view(
        prompts, branches, width
    )
