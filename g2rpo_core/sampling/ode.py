"""Deterministic steps of the sampler, of first and second order; all arithmetic is float32."""

import math

import torch


def ode(
    latents: torch.Tensor, velocity: torch.Tensor, sigma: float, next_sigma: float
) -> torch.Tensor:
    """Make an Euler step x + v Delta between two sigmas (paper Eq. 1), float32; no density."""
    return latents.float() + velocity.float() * (next_sigma - sigma)


def dpm2(
    latents: torch.Tensor,
    x0: torch.Tensor,
    before: torch.Tensor,
    sigmas: tuple[float, float, float],
) -> torch.Tensor:
    """Make a midpoint step of DPM-Solver++(2M) (arXiv 2211.01095, Algorithm 2), float32.

    On the linear path, alpha = 1 - sigma. x0, before: the clean samples predicted at sigma and at
    the one before it; sigmas: (the sigma before, sigma, next sigma), falling. First order if the
    sigma before is 1 (its log-SNR is minus infinity) and at the jump to 0, as in MixGRPO-Flash.
    """
    last, sigma, following = sigmas
    if last == 1 or following == 0:
        slope = 0.0
    else:
        log_snr = [math.log((1 - each) / each) for each in sigmas]
        slope = (log_snr[2] - log_snr[1]) / (log_snr[1] - log_snr[0]) / 2
    shrunk = following / sigma  # sigma' / sigma; alpha' (1 - e^-h) is then 1 - sigma' / sigma
    return shrunk * latents.float() + (1 - shrunk) * (x0 + slope * (x0 - before))
