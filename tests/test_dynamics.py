import math
from pathlib import Path

import numpy as np
import pytest
import torch

from g2rpo_core.dynamics import SDES, ode
from g2rpo_core.schedule import shifted_sigmas

GOLDENS = Path(__file__).parent / "goldens"


@pytest.mark.parametrize("file", ["steps_t16", "steps_t25_eta03"])
@pytest.mark.parametrize("sde", ["flow", "dance"])
def test_transitions_are_the_published_ones(file, sde):
    golden = np.load(GOLDENS / f"{file}.npz")
    latents, velocity, following, sigmas = (
        torch.from_numpy(golden[key]) for key in ("latents", "velocity", "next_latents", "sigmas")
    )
    for step in range(len(sigmas) - 1):
        transition = SDES[sde](latents, velocity, sigmas, step, float(golden["eta"]))
        for name, ours in (
            ("mean", transition.mean),
            ("std", transition.std.squeeze()),
            ("x0", transition.x0),
            ("log_prob", transition.log_prob(following)),
        ):
            expected = golden[f"{sde}_{name}"][step]
            np.testing.assert_allclose(ours, expected, rtol=2e-5, atol=2e-6, err_msg=f"{sde} {name} at step {step}")


@pytest.mark.parametrize("sde", ["flow", "dance"])
def test_steps_may_differ_between_samples(sde):
    torch.manual_seed(0)
    latents, velocity = torch.randn(2, 6, 5, 3)
    sigmas, steps = shifted_sigmas(16, 3.0), torch.tensor([0, 3, 7, 14, 0, 9])
    together = SDES[sde](latents, velocity, sigmas, steps, 0.7)
    for n, step in enumerate(steps.tolist()):
        alone = SDES[sde](latents[n : n + 1], velocity[n : n + 1], sigmas, step, 0.7)
        assert torch.equal(together.mean[n : n + 1], alone.mean)
        assert torch.equal(together.std[n], alone.std[0])


@pytest.mark.parametrize("sde", ["flow", "dance"])
def test_log_prob_is_the_mean_gaussian_density(sde):
    torch.manual_seed(0)
    latents, velocity, noise = torch.randn(3, 4, 8, 8)
    transition = SDES[sde](latents, velocity, shifted_sigmas(16, 3.0), 2, 0.7)
    following = transition.sample(noise)
    normal = torch.distributions.Normal(transition.mean, transition.std.expand_as(transition.mean))
    torch.testing.assert_close(transition.log_prob(following), normal.log_prob(following).mean((1, 2)))
    torch.testing.assert_close((following - transition.mean) / transition.std, noise, rtol=1e-4, atol=1e-4)


def test_low_precision_models_do_not_lower_the_arithmetic():
    torch.manual_seed(0)
    latents, velocity = torch.randn(2, 4, 8).bfloat16()
    transition = SDES["flow"](latents, velocity, shifted_sigmas(16, 3.0), 3, 0.7)
    exact = SDES["flow"](latents.float(), velocity.float(), shifted_sigmas(16, 3.0), 3, 0.7)
    assert torch.equal(transition.mean, exact.mean)
    assert transition.mean.dtype == transition.log_prob(latents).dtype == torch.float32


def test_euler_is_exact_for_a_constant_velocity():
    sigmas = shifted_sigmas(16, 3.0)
    start, velocity = torch.randn(3, 5), torch.randn(3, 5)
    x = start
    for step in range(16):
        x = ode(x, velocity, sigmas[step], sigmas[step + 1])
    torch.testing.assert_close(x, start - velocity)


@pytest.mark.parametrize("sde", ["flow", "dance"])
def test_stochastic_paths_keep_the_marginals_of_the_ode(sde):
    """Data N(m, s^2) has a linear velocity field in closed form; the SDE must reproduce the ODE's mean and variance.

    The moments of the discretized SDE are propagated exactly (each step is affine in x), so only the step size is left.
    """
    m, s, steps, eta = 0.8, 0.5, 4000, 0.7
    sigmas = shifted_sigmas(steps, 3.0)

    def velocity(x, sigma):
        # E[noise - x0 | x] for x = (1 - sigma) x0 + sigma noise
        variance = (1 - sigma) ** 2 * s**2 + sigma**2
        x0 = m + (1 - sigma) * s**2 / variance * (x - (1 - sigma) * m)
        noise = sigma / variance * (x - (1 - sigma) * m)
        return noise - x0

    start = steps // 20  # away from sigma = 1, where the published formula replaces a singular factor
    sigma = sigmas[start].double()
    mean, variance = (1 - sigma) * m, (1 - sigma) ** 2 * s**2 + sigma**2
    points = torch.tensor([[0.0], [1.0]])
    for step in range(start, steps - 1):
        transition = SDES[sde](points, velocity(points, sigmas[step]), sigmas, step, eta)
        offset, slope = transition.mean[0].double(), (transition.mean[1] - transition.mean[0]).double()
        mean, variance = slope * mean + offset, slope**2 * variance + transition.std.double().reshape(()) ** 2
    sigma = sigmas[-2].double()
    assert mean.item() == pytest.approx(((1 - sigma) * m).item(), abs=0.01)
    assert math.sqrt(variance.item()) == pytest.approx(math.sqrt(((1 - sigma) ** 2 * s**2 + sigma**2).item()), rel=0.02)
