"""The clipped policy objective (paper Eq. 6, 9 and 12), as a loss to be minimized."""

import torch


def ratio(log_prob: torch.Tensor, old_log_prob: torch.Tensor) -> torch.Tensor:
    """Return the probability ratio r of a transition under the current and the sampling policy (Eq. 7); exactly 1 before an update."""
    return (log_prob - old_log_prob).exp()


def normalized_ratio(
    log_prob: torch.Tensor, old_log_prob: torch.Tensor, drift: torch.Tensor, std: torch.Tensor
) -> torch.Tensor:
    """Return the ratio of GRPO-Guard (arXiv 2510.22319, Eq. 8): with mean 1 and a spread that no longer depends on sigma.

    drift: KL divergence of the current transition to the sampling one; on average the log-ratio is
    this far below 0. std: of the transition; multiplying by it makes the log-ratio's spread
    independent of sigma. All have the same shape.
    """
    return ((log_prob - old_log_prob + drift) * std).exp()


def clipped_loss(ratio: torch.Tensor, advantages: torch.Tensor, clip_range: float) -> torch.Tensor:
    """Return -min(r A, clip(r, 1 - eps, 1 + eps) A) for every sample (Eq. 9, beta = 0), shape of the arguments.

    ratio, advantages: float32 of one shape; clip_range: eps > 0, about 1e-4 because
    log-probabilities are averages.
    """
    # The minimum keeps the gradient of a ratio that left the range against its advantage, and drops
    # it where the policy already went as far as it may
    return -torch.minimum(
        ratio * advantages, ratio.clamp(1 - clip_range, 1 + clip_range) * advantages
    )


def masked_loss(
    ratio: torch.Tensor, advantages: torch.Tensor, divergence: torch.Tensor, threshold: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return -r A, but 0 where the policy has moved too far and would move on (Flow-DPPO, arXiv 2606.11025, Eq. 18); and where it is 0.

    divergence: exact KL divergence of the current transition to the sampling one, a mean over
    elements; threshold: up to which nothing is masked. Beyond it a transition counts that leads
    back: r > 1 with A < 0, or r < 1 with A > 0. All of one shape.
    """
    # On its way back a transition keeps its gradient: a mask by distance alone would trap the
    # policy outside
    onwards = ((ratio > 1) & (advantages > 0)) | ((ratio < 1) & (advantages < 0))
    masked = (divergence >= threshold) & onwards
    return torch.where(masked, 0.0, -ratio * advantages), masked
