"""Transitions of the sampler from one noise level to the next: the deterministic one and the stochastic ones.

Latents are [N, ...] of any shape and dtype; all arithmetic is float32, because clip ranges of 1e-4 on the probability
ratio leave no room for the 5e-3 that bfloat16 costs. With sigma the noise level, v the velocity and x0 = x - sigma v,
Delta = sigma' - sigma < 0 is the change of level in one step.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

Step = int | torch.Tensor  # a step index for all latents, or int64 [N] with one for each


@dataclass(frozen=True)
class Transition:
    """A Gaussian step: next latents ~ N(mean, std^2).

    mean, x0: float32 [N, ...]; std: float32 that broadcasts against mean, positive; x0 is the predicted clean sample.
    """

    mean: torch.Tensor
    std: torch.Tensor
    x0: torch.Tensor

    def repeat(self, members: int) -> "Transition":
        """The transition of N states as that of N * members, each state's members side by side."""
        parts = (self.mean, self.std, self.x0)
        return Transition(*(part if len(part) == 1 < len(self.mean) else part.repeat_interleave(members, 0) for part in parts))

    def kl(self, other: "Transition") -> torch.Tensor:
        """KL divergence to a transition of the same std, averaged over all elements but the batch: float32 [N] (Flow-GRPO)."""
        return ((self.mean - other.mean) / self.std).square().flatten(1).mean(1) / 2

    def sample(self, noise: torch.Tensor) -> torch.Tensor:
        """mean + std * noise, float32; noise: standard normal, shape of mean."""
        return self.mean + self.std * noise.float()

    def log_prob(self, next_latents: torch.Tensor) -> torch.Tensor:
        """Log-density of next_latents [N, ...], *averaged* over all elements but the batch: float32 [N].

        The average (published code) instead of the sum makes the ratio's scale independent of the resolution.
        """
        z = (next_latents.float() - self.mean) / self.std
        density = -0.5 * z.square() - self.std.log() - 0.5 * math.log(2 * math.pi)
        return density.flatten(1).mean(1)


def _levels(sigmas: torch.Tensor, step: Step, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """sigma[step] and sigma[step+1] in float32, shaped to broadcast against `like` [N, ...]; waits for no device."""
    sigmas = sigmas.to(like.device, torch.float32)
    shape = (-1,) + (1,) * (like.ndim - 1)
    return sigmas[step].view(shape), sigmas[step + 1].view(shape)


def ode(latents: torch.Tensor, velocity: torch.Tensor, sigma: float, next_sigma: float) -> torch.Tensor:
    """Euler step x + v Delta between two levels (paper Eq. 1), float32. There is no density, so no Transition."""
    return latents.float() + velocity.float() * (next_sigma - sigma)


def dpm2(latents: torch.Tensor, x0: torch.Tensor, before: torch.Tensor, sigmas: tuple[float, float, float]) -> torch.Tensor:
    """DPM-Solver++(2M), midpoint (arXiv 2211.01095, Algorithm 2), on the linear path alpha = 1 - sigma; float32.

    x0, before: the clean samples predicted at sigma and at the level before it; sigmas: (level before, sigma, next sigma),
    falling. First order where the level before is 1 (its log-SNR is minus infinity) and at the jump to 0, as MixGRPO-Flash has it.
    """
    last, sigma, following = sigmas
    if last == 1 or following == 0:
        slope = 0.0
    else:
        log_snr = [math.log((1 - level) / level) for level in sigmas]
        slope = (log_snr[2] - log_snr[1]) / (log_snr[1] - log_snr[0]) / 2
    shrunk = following / sigma  # sigma' / sigma; alpha' (1 - e^-h) is then 1 - sigma' / sigma
    return shrunk * latents.float() + (1 - shrunk) * (x0 + slope * (x0 - before))


def flow_sde(latents: torch.Tensor, velocity: torch.Tensor, sigmas: torch.Tensor, step: Step, eta: float) -> Transition:
    """Flow-GRPO's SDE (paper Eq. 2 and 3), used by Flow-GRPO, MixGRPO and G2RPO with eta = 0.7.

    s = eta sqrt(sigma / (1 - sigma)), singular at sigma = 1, where 1 - sigma[1] replaces 1 - sigma (published code).

    sigmas: [T+1] of `shifted_sigmas`; step: in 0...T-1; methods leave out the last, whose density is too narrow to train on.
    """
    x, v = latents.float(), velocity.float()
    sigma, next_sigma = _levels(sigmas, step, x)
    delta = next_sigma - sigma
    s = eta * (sigma / (1 - torch.where(sigma == 1, sigmas[1].to(sigma), sigma))).sqrt()
    mean = x * (1 + s**2 * delta / (2 * sigma)) + v * (1 + s**2 * (1 - sigma) / (2 * sigma)) * delta
    return Transition(mean, s * (-delta).sqrt(), x - sigma * v)


def dance_sde(latents: torch.Tensor, velocity: torch.Tensor, sigmas: torch.Tensor, step: Step, eta: float) -> Transition:
    """DanceGRPO's SDE with constant noise eta (0.3), by the score of the linear path; arguments as `flow_sde`."""
    x, v = latents.float(), velocity.float()
    sigma, next_sigma = _levels(sigmas, step, x)
    delta = next_sigma - sigma
    x0 = x - sigma * v
    minus_score = (x - (1 - sigma) * x0) / sigma**2
    mean = x + v * delta + 0.5 * eta**2 * minus_score * delta
    return Transition(mean, eta * (-delta).sqrt(), x0)


def cps(latents: torch.Tensor, velocity: torch.Tensor, sigmas: torch.Tensor, step: Step, eta: float) -> Transition:
    """Coefficient-preserving sampling (arXiv 2509.05952): the noise takes the place of as much predicted noise; eta in (0, 1)."""
    x, v = latents.float(), velocity.float()
    sigma, next_sigma = _levels(sigmas, step, x)
    x0, x1 = x - sigma * v, x + (1 - sigma) * v
    std = next_sigma * math.sin(eta * math.pi / 2)
    return Transition((1 - next_sigma) * x0 + (next_sigma**2 - std**2).sqrt() * x1, std, x0)


Stochastic = Callable[..., Transition]
"""transition(latents [N, ...], velocity [N, ...], step=int or int64 [N]) -> Transition: an SDE with its levels and eta fixed."""

SDES: dict[str, Callable[..., Transition]] = {"flow": flow_sde, "dance": dance_sde, "cps": cps}
