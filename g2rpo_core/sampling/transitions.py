"""Stochastic transitions of the sampler from one sigma to the next, each with the paper's equation.

Latents are [N, ...] of any shape and dtype; all arithmetic is float32, because clip ranges of 1e-4
on the probability ratio leave no room for the 5e-3 that bfloat16 costs. With v the velocity and x0
= x - sigma v, Delta = sigma' - sigma < 0 is the change of sigma in one step.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import torch

Step: TypeAlias = int | torch.Tensor  # a step index for all latents, or int64 [N] with one for each


@dataclass(frozen=True)
class Transition:
    """A Gaussian step: next latents ~ N(mean, std^2); all tensors float32."""

    mean: torch.Tensor
    """[N, ...]."""
    std: torch.Tensor
    """Positive; broadcasts against the mean."""

    def repeat(self, members: int) -> "Transition":
        """Return the transition of N * members states: each of the N states `members` times."""
        parts = (self.mean, self.std)
        return Transition(
            *(
                part if len(part) == 1 < len(self.mean) else part.repeat_interleave(members, 0)
                for part in parts
            )
        )

    def kl(self, other: "Transition") -> torch.Tensor:
        """Return the KL divergence to a transition of the same std, a mean over elements: [N].

        float32, as in Flow-GRPO.
        """
        return ((self.mean - other.mean) / self.std).square().flatten(1).mean(1) / 2

    def sample(self, noise: torch.Tensor) -> torch.Tensor:
        """Return mean + std * noise, float32; noise: standard normal, shape of mean."""
        return self.mean + self.std * noise.float()

    def log_prob(self, next_latents: torch.Tensor) -> torch.Tensor:
        """Return the log-density of next_latents [N, ...], a mean over elements: float32 [N].

        The mean (published code) instead of the sum makes the ratio's scale independent of the
        resolution.
        """
        z = (next_latents.float() - self.mean) / self.std
        density = -0.5 * z.square() - self.std.log() - 0.5 * math.log(2 * math.pi)
        # A GPU sums in an order that depends on addresses; in float64 the ratio of two equal calls
        # stays exactly 1
        wide = density.dtype if density.is_cpu else torch.float64
        return density.flatten(1).mean(1, dtype=wide).to(density.dtype)


def _sigmas_at(
    sigmas: torch.Tensor, step: Step, span: Step, like: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return sigma[step] and sigma[step+span], float32, to broadcast against `like` [N, ...].

    Nothing waits for the device.
    """
    sigmas = sigmas.to(like.device, torch.float32)
    shape = (-1,) + (1,) * (like.ndim - 1)
    return sigmas[step].view(shape), sigmas[step + span].view(shape)


def flow_sde(
    latents: torch.Tensor,
    velocity: torch.Tensor,
    sigmas: torch.Tensor,
    step: Step,
    eta: float,
    span: Step = 1,
) -> Transition:
    """Make a step of Flow-GRPO's SDE (paper Eq. 2, 3); MixGRPO and G2RPO, too, with eta = 0.7.

    s = eta sqrt(sigma / (1 - sigma)), singular at sigma = 1, where 1 - sigma[1] replaces 1 - sigma
    (published code).

    sigmas: [T+1] of `shifted_sigmas`; step: in 0...T-1; methods leave out the last, whose density
    is too narrow to train on; span: how many steps of the grid this one takes at once (E-GRPO
    merges several, arXiv 2601.00423), to sigma[step+span].
    """
    x, v = latents.float(), velocity.float()
    sigma, next_sigma = _sigmas_at(sigmas, step, span, x)
    delta = next_sigma - sigma
    s = eta * (sigma / (1 - torch.where(sigma == 1, sigmas[1].to(sigma), sigma))).sqrt()
    mean = x * (1 + s**2 * delta / (2 * sigma)) + v * (1 + s**2 * (1 - sigma) / (2 * sigma)) * delta
    return Transition(mean, s * (-delta).sqrt())


def dance_sde(
    latents: torch.Tensor,
    velocity: torch.Tensor,
    sigmas: torch.Tensor,
    step: Step,
    eta: float,
    span: Step = 1,
) -> Transition:
    """Make a step of DanceGRPO's SDE: constant noise eta (0.3), the linear path's score.

    Arguments as in `flow_sde`.
    """
    x, v = latents.float(), velocity.float()
    sigma, next_sigma = _sigmas_at(sigmas, step, span, x)
    delta = next_sigma - sigma
    x0 = x - sigma * v
    minus_score = (x - (1 - sigma) * x0) / sigma**2
    mean = x + v * delta + 0.5 * eta**2 * minus_score * delta
    return Transition(mean, eta * (-delta).sqrt())


def cps(
    latents: torch.Tensor,
    velocity: torch.Tensor,
    sigmas: torch.Tensor,
    step: Step,
    eta: float,
    span: Step = 1,
) -> Transition:
    """Make a step of coefficient-preserving sampling (arXiv 2509.05952); eta in (0, 1].

    New noise replaces as much of the predicted noise. Arguments as in `flow_sde`.
    """
    x, v = latents.float(), velocity.float()
    sigma, next_sigma = _sigmas_at(sigmas, step, span, x)
    x0, x1 = x - sigma * v, x + (1 - sigma) * v
    std = next_sigma * math.sin(eta * math.pi / 2)
    return Transition((1 - next_sigma) * x0 + (next_sigma**2 - std**2).sqrt() * x1, std)


Stochastic = Callable[..., Transition]
"""transition(latents [N, ...], velocity [N, ...], step=, span=1) -> Transition, with eta fixed."""

SDES: dict[str, Callable[..., Transition]] = {"flow": flow_sde, "dance": dance_sde, "cps": cps}
