"""The clipped policy objective (paper Eq. 6, 9 and 12), as a loss to be minimized."""

import torch


def ratio(log_prob: torch.Tensor, old_log_prob: torch.Tensor) -> torch.Tensor:
    """Return the ratio of current to sampling policy (Eq. 7); exactly 1 before any update."""
    return (log_prob - old_log_prob).exp()


def normalized_ratio(
    log_prob: torch.Tensor, old_log_prob: torch.Tensor, drift: torch.Tensor, std: torch.Tensor
) -> torch.Tensor:
    """Return the ratio of GRPO-Guard (arXiv 2510.22319, Eq. 8).

    Its mean is 1 and its spread does not depend on sigma. drift: KL divergence of the current
    transition to the sampling one, which is how far the log-ratio is below 0 on average. std: of
    the transition, which scales the log-ratio. All have the same shape.
    """
    return ((log_prob - old_log_prob + drift) * std).exp()


def clipped_loss(ratio: torch.Tensor, advantages: torch.Tensor, clip_range: float) -> torch.Tensor:
    """Return -min(r A, clip(r, 1 - eps, 1 + eps) A) for every sample (Eq. 9, beta = 0).

    ratio, advantages: float32 of one shape, also the result's; clip_range: eps > 0, about 1e-4
    because log-probabilities are averages.
    """
    # The minimum keeps the gradient of a ratio that left the range against its advantage, and drops
    # it where the policy already went as far as it may
    return -torch.minimum(
        ratio * advantages, ratio.clamp(1 - clip_range, 1 + clip_range) * advantages
    )


def masked_loss(
    ratio: torch.Tensor, advantages: torch.Tensor, divergence: torch.Tensor, threshold: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return -r A with masked samples at 0, and the mask (Flow-DPPO, arXiv 2606.11025, Eq. 18).

    A sample is masked if the policy has moved too far and would move on. divergence: exact KL
    divergence of the current transition to the sampling one, a mean over elements; threshold: below
    it nothing is masked, beyond it samples that lead back still count (r > 1 with A < 0, or r < 1
    with A > 0). All of one shape.
    """
    # On its way back a transition keeps its gradient: a mask by distance alone would trap the
    # policy outside
    onwards = ((ratio > 1) & (advantages > 0)) | ((ratio < 1) & (advantages < 0))
    masked = (divergence >= threshold) & onwards
    return torch.where(masked, 0.0, -ratio * advantages), masked
