"""Turns rewards into advantages, per reward and granularity, and sums them (paper Eq. 4, 8 and 11)."""

from collections.abc import Sequence

import torch

OF_BATCH = (
    1e-4  # added to the standard deviation of a batch, as in flow_grpo's `PerPromptStatTracker`
)
# Spread of a group, over the size of its rewards, up to which they are equal. Rewards come as
# float32, whatever computed them: equal images in two calls of a scorer, whose sums a library
# orders by the size of the batch, differ in their last bits, by up to 7 eps of float32 in calls of
# 1 to 16 images by the CLIP-like scorers of profile `tiny`. Eight are 8 to 16 units in the last
# place.
EQUAL = 8 * torch.finfo(torch.float32).eps


def without_spread(rewards: torch.Tensor, size: torch.Tensor | None = None) -> torch.Tensor:
    """Say of which groups [..., G] all rewards are equal but for their last bits: [..., 1] bool.

    size: of the numbers from which the rewards were computed, where that is larger than the
    rewards, as of differences; shape of rewards.
    """
    rewards = rewards.double()
    largest = (rewards if size is None else size.double()).abs().amax(-1, keepdim=True)
    return rewards.amax(-1, keepdim=True) - rewards.amin(-1, keepdim=True) <= EQUAL * largest


def standardized(
    rewards: torch.Tensor, deviation: torch.Tensor | None = None, size: torch.Tensor | None = None
) -> torch.Tensor:
    """Return (r - mean) / (std + 1e-8) over the last axis, std with ddof 1 (Eq. 4), in float64; float32, shape of rewards.

    A group `without_spread` carries no signal: it gets 0, not its rounding over a deviation that is
    rounding as well. deviation: of all rewards together, in place of each group's own; broadcasts
    against the rewards. size: as of `without_spread`.
    """
    # float64: the mean of equal rewards is not that reward in float32, and 0 / 0 becomes a signal
    values = rewards.double()
    divisor = (
        values.std(-1, keepdim=True) + 1e-8 if deviation is None else deviation.double() + OF_BATCH
    )
    scaled = (values - values.mean(-1, keepdim=True)) / divisor
    return torch.where(without_spread(values, size), 0.0, scaled).float()


def correlation(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Return Pearson's correlation within each group [..., G] of two standardized tensors: [...]; 0 where all of either are equal."""
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
    deviation: [R, J, 1, 1], and size: [R, J, K, G], as of `standardized`.

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
    """Return the mean over the members [..., G] of each of so many shared states, whose members stand side by side: [..., states]."""
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

    groups: into which a prompt's branch is divided, whose members stand side by side; deviation:
    [R, J, 1, 1], and size: shape of rewards, as of `standardized`. A group of one has an advantage
    of 0.
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
