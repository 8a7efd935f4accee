import math

import numpy as np
import pytest
import torch

from g2rpo_core.sampling.ode import dpm2, ode
from g2rpo_core.sampling.schedule import shifted_sigmas, sigma_at
from g2rpo_core.sampling.transitions import SDES
from tests.conftest import GOLDENS


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
            ("log_prob", transition.log_prob(following)),
        ):
            expected = golden[f"{sde}_{name}"][step]
            np.testing.assert_allclose(
                ours, expected, rtol=2e-5, atol=2e-6, err_msg=f"{sde} {name} at step {step}"
            )


@pytest.mark.parametrize("sde", SDES)
def test_steps_may_differ_between_samples(sde):
    torch.manual_seed(0)
    latents, velocity = torch.randn(2, 6, 5, 3)
    sigmas, steps = shifted_sigmas(16, 3.0), torch.tensor([0, 3, 7, 14, 0, 9])
    together = SDES[sde](latents, velocity, sigmas, steps, 0.7)
    for n, step in enumerate(steps.tolist()):
        alone = SDES[sde](latents[n : n + 1], velocity[n : n + 1], sigmas, step, 0.7)
        assert torch.equal(together.mean[n : n + 1], alone.mean)
        assert torch.equal(together.std[n], alone.std[0])


@pytest.mark.parametrize("sde", SDES)
def test_log_prob_is_the_mean_gaussian_density(sde):
    torch.manual_seed(0)
    latents, velocity, noise = torch.randn(3, 4, 8, 8)
    transition = SDES[sde](latents, velocity, shifted_sigmas(16, 3.0), 2, 0.7)
    following = transition.sample(noise)
    normal = torch.distributions.Normal(transition.mean, transition.std.expand_as(transition.mean))
    torch.testing.assert_close(
        transition.log_prob(following), normal.log_prob(following).mean((1, 2))
    )
    torch.testing.assert_close(
        (following - transition.mean) / transition.std, noise, rtol=1e-4, atol=1e-4
    )


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


def test_cps_puts_noise_in_the_place_of_predicted_noise():
    """x' = (1 - sigma') x0 + sigma' n, with as much noise n as at the start; without any, Euler."""
    torch.manual_seed(0)
    x0, x1 = torch.randn(2, 1, 100_000)
    sigmas, step = shifted_sigmas(16, 3.0), 5
    latents, velocity = (1 - sigmas[step]) * x0 + sigmas[step] * x1, x1 - x0
    quiet = SDES["cps"](latents, velocity, sigmas, step, 1e-9)
    torch.testing.assert_close(
        quiet.mean, ode(latents, velocity, sigmas[step], sigmas[step + 1]), rtol=1e-4, atol=1e-5
    )
    assert SDES["cps"](latents, velocity, sigmas, step, 1.0).mean.equal(
        (1 - sigmas[step + 1]) * (latents - sigmas[step] * velocity)
    )
    loud = SDES["cps"](latents, velocity, sigmas, step, 0.7)
    noise = (loud.sample(torch.randn(1, 100_000)) - (1 - sigmas[step + 1]) * x0) / sigmas[step + 1]
    assert noise.std().item() == pytest.approx(1, abs=0.01)
    assert (noise * x1).mean().item() == pytest.approx(math.cos(0.35 * math.pi), abs=0.01)


def test_kl_is_that_of_gaussians():
    torch.manual_seed(0)
    latents, velocity, other = torch.randn(3, 4, 8, 8)
    sigmas = shifted_sigmas(16, 3.0)
    first, second = (SDES["flow"](latents, v, sigmas, 2, 0.7) for v in (velocity, other))
    normals = [torch.distributions.Normal(t.mean, t.std.expand_as(t.mean)) for t in (first, second)]
    torch.testing.assert_close(
        first.kl(second), torch.distributions.kl_divergence(*normals).mean((1, 2))
    )


def test_kl_is_flow_grpos_in_velocities_so_it_shrinks_with_the_step():
    """-Delta / 2 (s (1 - sigma) / (2 sigma) + 1 / s)^2 |v - v'|^2: the unit of `kl_coef`."""
    torch.manual_seed(0)
    latents, velocity, other = torch.randn(3, 4, 8, 8)
    for steps in (10, 40):
        sigmas = shifted_sigmas(steps, 3.0)
        for step in range(1, steps - 1):
            first, second = (SDES["flow"](latents, v, sigmas, step, 0.7) for v in (velocity, other))
            sigma, length = sigmas[step], sigmas[step] - sigmas[step + 1]
            s = 0.7 * (sigma / (1 - sigma)).sqrt()
            factor = length / 2 * (s * (1 - sigma) / (2 * sigma) + 1 / s) ** 2
            torch.testing.assert_close(
                first.kl(second),
                factor * (velocity - other).square().mean((1, 2)),
                rtol=1e-3,
                atol=0,
            )


def test_second_order_steps_converge_faster_than_euler():
    """Gaussian data has a path in closed form; half the step quarters the error."""
    spread, start = 0.5, torch.tensor([[1.5]])
    scale = lambda sigma: math.sqrt((1 - sigma) ** 2 * spread**2 + sigma**2)
    errors = {"dpm2": [], "euler": []}
    for steps in (40, 80):
        sigmas = [sigma_at(step, steps, 3.0) for step in range(4 * steps // 5 + 1)]
        for solver, error in errors.items():
            x, before, last = start, start, 1.0
            for sigma, following in zip(sigmas, sigmas[1:]):
                x0 = (1 - sigma) * spread**2 / scale(sigma) ** 2 * x
                v = (x - x0) / sigma
                x = (
                    ode(x, v, sigma, following)
                    if solver == "euler"
                    else dpm2(x, x0, before, (last, sigma, following))
                )
                before, last = x0, sigma
            error.append(abs(x.item() - start.item() * scale(sigmas[-1])))
    assert errors["euler"][0] / errors["euler"][1] == pytest.approx(2, abs=0.3)
    assert errors["dpm2"][0] / errors["dpm2"][1] > 3
    assert errors["dpm2"][1] < errors["euler"][1] / 5


def test_second_order_steps_take_the_prediction_in_the_middle_of_the_log_snr():
    """Exact where predictions are linear in it (arXiv 2211.01095, Algorithm 2)."""
    sigmas, x = (0.8, 0.65, 0.3), torch.tensor([1.5])
    log_snr = [math.log((1 - sigma) / sigma) for sigma in sigmas]
    x0 = lambda at: torch.tensor([0.4 - 0.3 * at])
    kept = sigmas[2] / sigmas[1]
    middle = x0((log_snr[1] + log_snr[2]) / 2)
    stepped = dpm2(x, x0(log_snr[1]), x0(log_snr[0]), sigmas)
    torch.testing.assert_close(stepped, kept * x + (1 - kept) * middle)


def test_every_shift_begins_at_one():
    """Where a second-order step would else take the logarithm of a number beside it."""
    shifts = [number / 100 for number in range(1, 500)]
    assert {sigma_at(0, 10, shift) for shift in shifts} == {1.0}
    assert all(
        sigma_at(1, 10, shift) == pytest.approx(shift * 0.9 / (1 + (shift - 1) * 0.9))
        for shift in shifts
    )


def test_the_last_second_order_step_lands_on_the_prediction():
    x, x0, before = torch.randn(3, 2, 4)
    torch.testing.assert_close(dpm2(x, x0, before, (0.6, 0.3, 0.0)), x0)


@pytest.mark.parametrize("sde", ["flow", "dance"])
def test_stochastic_paths_keep_the_marginals_of_the_ode(sde):
    """Data N(m, s^2) has a linear velocity field; the SDE must have the ODE's mean and variance.

    The moments of the discretized SDE are propagated exactly (each step is affine in x), so only
    the step size is left.
    """
    m, s, steps, eta = 0.8, 0.5, 4000, 0.7
    sigmas = shifted_sigmas(steps, 3.0)

    def velocity(x, sigma):
        # E[noise - x0 | x] for x = (1 - sigma) x0 + sigma noise
        variance = (1 - sigma) ** 2 * s**2 + sigma**2
        x0 = m + (1 - sigma) * s**2 / variance * (x - (1 - sigma) * m)
        noise = sigma / variance * (x - (1 - sigma) * m)
        return noise - x0

    start = (
        steps // 20
    )  # away from sigma = 1, where the published formula replaces a singular factor
    sigma = sigmas[start].double()
    mean, variance = (1 - sigma) * m, (1 - sigma) ** 2 * s**2 + sigma**2
    points = torch.tensor([[0.0], [1.0]])
    for step in range(start, steps - 1):
        transition = SDES[sde](points, velocity(points, sigmas[step]), sigmas, step, eta)
        offset, slope = (
            transition.mean[0].double(),
            (transition.mean[1] - transition.mean[0]).double(),
        )
        mean, variance = (
            slope * mean + offset,
            slope**2 * variance + transition.std.double().reshape(()) ** 2,
        )
    sigma = sigmas[-2].double()
    assert mean.item() == pytest.approx(((1 - sigma) * m).item(), abs=0.01)
    assert math.sqrt(variance.item()) == pytest.approx(
        math.sqrt(((1 - sigma) ** 2 * s**2 + sigma**2).item()), rel=0.02
    )
