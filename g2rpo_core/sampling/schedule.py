"""Sigmas of the sampler, and the step indices at which the tails of each granularity are evaluated.

Steps count from the noisy end: step i goes from sigma[i] to sigma[i+1], sigma[0] = 1 and sigma[T] =
0. The paper counts from the clean end, so its step t is our i = T - t and its M = {16, ..., 9} is
our 0...7.
"""

from typing import Literal

import torch

Grid = Literal["released", "paper", "even"]


def shifted_sigmas(steps: int, shift: float) -> torch.Tensor:
    """Return sigma = s u / (1 + (s - 1) u) at u = 1 - i/T, float32 [T+1], falling from 1 to 0.

    steps: T >= 1; shift: s > 0 (1 is uniform). ValueError otherwise.
    """
    if steps < 1 or shift <= 0:
        raise ValueError(f"need steps >= 1 and shift > 0, got {steps} and {shift}")
    return torch.tensor(even_sigmas(steps, shift))


def even_sigmas(steps: int, shift: float) -> list[float]:
    """Return `shifted_sigmas` in double precision, for sampling without noise."""
    return [sigma_at(step, steps, shift) for step in range(steps + 1)]


def sigma_at(step: float, steps: int, shift: float) -> float:
    """Return sigma at a step index in 0...T, which may lie between two steps."""
    u = 1 - step / steps
    # Exactly 1 at step 0, where some shifts below 1 round to a number beside it
    return shift * u / (1 + (shift - 1) * u) if step else 1.0


def tail(steps: int, noisy_step: int, granularity: int, grid: Grid = "released") -> list[float]:
    """Return the step indices evaluated after the noisy step k at granularity lambda.

    sigma = 0 follows the last one. All grids start at k+1. `released` (published code): then k+2,
    k+2+lambda, ..., without the last
    entry of `sigma[k+2::lambda]`, which the jump to sigma = 0 replaces. `paper` (Eq. 10, counted
    from the clean end): then every i with (T-1-i) divisible by lambda. `even`: the number of steps
    left, divided by lambda and rounded, as that many equal steps (so MixGRPO-Flash shortens its
    tails); the indices may lie between two steps.

    steps: T; noisy_step: 0 <= k <= T-2, because the last step is deterministic; granularity: >= 1.
    ValueError otherwise.
    """
    if not 0 <= noisy_step <= steps - 2:
        raise ValueError(
            f"noisy_step must be in 0...{steps - 2} for {steps} steps, got {noisy_step}"
        )
    if granularity < 1:
        raise ValueError(f"granularity must be at least 1, got {granularity}")
    if grid == "released":
        return [noisy_step + 1, *range(noisy_step + 2, steps + 1, granularity)][:-1]
    if grid == "paper":
        return [
            i
            for i in range(noisy_step + 1, steps)
            if i == noisy_step + 1 or (steps - 1 - i) % granularity == 0
        ]
    if grid == "even":
        left = steps - (noisy_step + 1)
        count = max(1, round(left / granularity))
        return [noisy_step + 1 + left * number / count for number in range(count)]
    raise ValueError(f"grid must be 'released', 'paper' or 'even', got {grid!r}")
