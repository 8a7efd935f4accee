"""Forward-process objectives: published formulas, equal limits, shared draws."""

import pytest
import torch
from pydantic import ValidationError

from g2rpo_core.algorithm.batch import Draws
from g2rpo_core.algorithm.credit import CreditAssignment, ImageCredit
from g2rpo_core.algorithm.matching import (
    HUBER,
    WEIGHTS,
    MatchingSettings,
    NoisedBatch,
    OldPolicy,
    VelocityMatching,
    branches,
    mean,
    quadratic,
)
from g2rpo_core.algorithm.methods import METHODS
from g2rpo_core.sampling.rollout import Rollout
from g2rpo_core.sampling.schedule import shifted_sigmas

ROWS, SHAPE = 4, (5, 3)
SIGMAS = shifted_sigmas(10, 3.0)
NOISED = ("diffusion_nft", "awm", "advantage_flow", "rvm", "ram")


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def noised(advantages: torch.Tensor, old: torch.Tensor | None = None) -> NoisedBatch:
    ones = torch.ones(ROWS, 1, dtype=torch.float64)
    return NoisedBatch(
        clean=random(ROWS, *SHAPE, seed=1),
        noise=random(ROWS, *SHAPE, seed=2),
        sigma=torch.tensor([1.0, 0.9, 0.6, 0.2]).double(),
        advantages=advantages[:, None],
        weights=ones,
        prompt=torch.zeros(ROWS, dtype=torch.int64),
        member=torch.arange(ROWS),
        old=old,
    )


V, OLD, BASE = (
    random(ROWS, *SHAPE, seed=3),
    random(ROWS, *SHAPE, seed=4),
    random(ROWS, *SHAPE, seed=5),
)
A = torch.tensor([0.8, -0.3, 0.1, -1.0]).double()


def gradient(
    name: str, v: torch.Tensor, old: torch.Tensor | None, advantages: torch.Tensor = A
) -> torch.Tensor:
    """Of a method's loss, by its own objective, with respect to the velocity."""
    leaf, settings = v.clone().requires_grad_(), METHODS[name].objective
    base = (lambda *arguments: BASE) if settings.needs_base else None
    losses = of_run(settings).losses(lambda *arguments: leaf, base, noised(advantages, old))
    losses.total.sum().backward()
    return leaf.grad


def written_out(loss, v: torch.Tensor) -> torch.Tensor:
    leaf = v.clone().requires_grad_()
    loss(leaf).sum().backward()
    return leaf.grad


def published_nft(v: torch.Tensor) -> torch.Tensor:
    """Its code's `train_nft_sd3.py`: advantages that are already in [-1, 1]."""
    batch, beta, t = noised(A), 1.0, noised(A).sigma.view(-1, 1, 1)
    r = (A / 2 + 0.5).clamp(0, 1)
    positive, negative = beta * v + (1 - beta) * OLD, (1 + beta) * OLD - beta * v
    losses = []
    for velocity in (positive, negative):
        x0 = batch.latents - t * velocity
        weight = (x0 - batch.clean).abs().flatten(1).mean(1).detach().clip(min=1e-5)
        losses.append(mean((x0 - batch.clean) ** 2) / weight)
    return 5 * (r * losses[0] / beta + (1 - r) * losses[1] / beta) + 1e-4 * mean((v - BASE) ** 2)


def published_awm(v: torch.Tensor) -> torch.Tensor:
    """Its ratio of surrogate likelihoods, at the policy that sampled, and its two penalties."""
    batch, power = noised(A), HUBER

    def log_likelihood(velocity):
        error = mean((velocity - (batch.noise - batch.clean)) ** 2)
        return -batch.sigma / power * ((error + 1e-10) ** power - 1e-10**power)

    ratio = (log_likelihood(v) - log_likelihood(v.detach())).exp()
    return (
        -torch.minimum(ratio * A, ratio.clamp(0, 2) * A)
        + mean((v - OLD) ** 2)
        + 1e-4 * mean((v - BASE) ** 2)
    )


def published_advantage_flow(v: torch.Tensor) -> torch.Tensor:
    """Equation 2 of arXiv 2609.37670, in clean predictions."""
    batch, t = noised(A), noised(A).sigma.view(-1, 1, 1)
    x0, of_old, of_base = (batch.latents - t * each for each in (v, OLD, BASE))
    weight = mean((x0 - batch.clean).abs()).detach().clamp(min=1e-5)
    return (
        A * mean((x0 - batch.clean) ** 2)
        + 1.1 * mean((x0 - of_old) ** 2)
        + 1e-3 * mean((x0 - of_base) ** 2)
    ) / weight


def published_rvm(v: torch.Tensor) -> torch.Tensor:
    batch = noised(A)
    return (A * mean((v - (batch.noise - batch.clean)) ** 2) + 1e-4 * mean((v - OLD) ** 2)) / 2


def published_ram(v: torch.Tensor) -> torch.Tensor:
    batch = noised(A)
    return mean((v - (BASE + A.view(-1, 1, 1) * ((batch.noise - batch.clean) - OLD))) ** 2)


@pytest.mark.parametrize(
    "name, published",
    [
        ("diffusion_nft", published_nft),
        ("awm", published_awm),
        ("advantage_flow", published_advantage_flow),
        ("rvm", published_rvm),
        ("ram", published_ram),
    ],
)
def test_gradients_are_those_of_the_published_formula(name, published):
    assert name in NOISED
    torch.testing.assert_close(gradient(name, V, OLD), written_out(published, V))


def test_recorded_are_the_distances_to_image_old_policy_and_base():
    batch = noised(A, OLD)
    losses = of_run(METHODS["diffusion_nft"].objective).losses(lambda *_: V, lambda *_: BASE, batch)
    of = {"velocity_error": batch.noise - batch.clean, "old_deviation": OLD, "kl": BASE}
    distances = {name: mean((V - other) ** 2).sum().item() for name, other in of.items()}
    recorded = {name: losses.sums[name].item() for name in of}
    assert recorded == pytest.approx(distances)


def test_on_its_own_policy_nfts_gradient_knows_the_advantages_its_value_not():
    of = lambda a: branches(V, V, noised(A).target, noised(A).sigma, a, 1.0)
    torch.testing.assert_close(of(A), of(-A))
    away = gradient("diffusion_nft", V, V), gradient("diffusion_nft", V, V, -A)
    without_kl = [each - written_out(lambda v: 1e-4 * mean((v - BASE) ** 2), V) for each in away]
    torch.testing.assert_close(without_kl[0], -without_kl[1])
    assert without_kl[0].abs().max() > 1e-3


@pytest.mark.parametrize("beta", [0.01, 0.1, 1.0])
def test_on_its_own_policy_nft_is_advantage_weighted_matching_whatever_beta_is(beta):
    batch = noised(A)
    weight = WEIGHTS["error"](V - batch.target, batch.sigma)
    matching = written_out(lambda v: weight * A * mean((v - batch.target) ** 2), V)
    for curvature in (0.0, beta):
        c = torch.full_like(A, curvature)
        kernel = written_out(lambda v, c=c: weight * quadratic(v, V, V, batch.target, A, c), V)
        torch.testing.assert_close(kernel, matching)
    torch.testing.assert_close(
        written_out(lambda v: branches(v, V, batch.target, batch.sigma, A, beta), V), matching
    )


def test_nft_with_beta_one_is_advantage_flow_with_gamma_one_minus_the_advantage():
    target = noised(A).target
    signed = lambda v: quadratic(v, OLD, OLD, target, A, (1 - A) + A)
    apart = lambda v: A * mean((v - target) ** 2) + (1 - A) * mean((v - OLD) ** 2)
    torch.testing.assert_close(written_out(signed, V), written_out(apart, V))


def test_the_best_velocity_lies_as_far_from_the_anchor_as_the_advantage_says():
    """Where the gradient is 0: v - v_old = A (v* - v_old) / c."""
    target, trust = noised(A).target, 1.1
    best = OLD + (A / (trust + A)).view(-1, 1, 1) * (target - OLD)
    assert (
        written_out(lambda v: quadratic(v, OLD, OLD, target, A, trust + A), best).abs().max()
        < 1e-12
    )


def images(
    advantages: torch.Tensor, shape: tuple[int, ...] = (2, 2, 1, 3)
) -> tuple[Rollout, list[torch.Tensor]]:
    """Clean latents [P, B, J, G, ...], and the advantages of every branch."""
    return Rollout(random(*shape, *SHAPE).float(), [], 0, (1,)), list(advantages.unbind(1))


def of_run(settings: MatchingSettings) -> VelocityMatching:
    return VelocityMatching(settings, CreditAssignment(ImageCredit(), 1, [1.0], 5.0), SIGMAS)


def trained(advantages: torch.Tensor | None = None, **settings: object) -> NoisedBatch:
    objective = MatchingSettings.model_validate(
        {"trains": "noised", "trust": 1.0, **settings}, strict=False
    )
    advantages = random(2, 2, 3, seed=6).float() if advantages is None else advantages
    velocity = lambda latents, sigma, prompt: latents * sigma.view(-1, 1, 1)
    return of_run(objective).noised(*images(advantages), Draws(0, 4, range(3, 5)), velocity)


def test_every_image_is_noised_as_often_as_asked_with_its_own_advantage():
    advantages = random(2, 2, 3, seed=6).float()
    batch = trained(advantages, times=4, advantage_scale=0.5, advantage_limit=0.6)
    assert len(batch) == 2 * 2 * 3 * 4
    grid = (2, 2, 3, 4)
    torch.testing.assert_close(
        batch.advantages.view(grid)[..., 1], (advantages / 2).clamp(-0.6, 0.6)
    )
    assert (
        batch.clean.view(*grid, *SHAPE)[:, :, :, 2] == images(advantages)[0].clean[:, :, 0]
    ).all()
    assert batch.prompt.view(grid)[1].unique().tolist() == [1] and batch.member.view(grid)[
        0, 1, :, 0
    ].tolist() == [0, 1, 2]
    times = batch.sigma.view(24 // 2, 4)[:, :, None].expand(-1, -1, 1)
    assert all(len(row.unique()) == 4 for row in times) and set(batch.sigma.tolist()) <= set(
        SIGMAS[:-1].tolist()
    )
    assert len(batch.noise.flatten(1).unique(dim=0)) == len(batch)


def test_members_that_share_have_the_same_times_and_noise():
    batch = trained(times=2, shared=True)
    sigma, noise = batch.sigma.view(2, 6, 2), batch.noise.view(2, 6, 2, -1)
    assert (
        (sigma == sigma[:, :1]).all()
        and (noise == noise[:, :1]).all()
        and not torch.equal(noise[0, 0], noise[1, 0])
    )
    assert not torch.equal(noise[0, 0, 0], noise[0, 0, 1])


def test_what_sharing_members_have_in_common_cancels():
    """Advantages sum to 0: only noise of their own gives equal images a common gradient."""
    advantages = torch.tensor([[[1.0, -2.0, 1.0], [0.5, 0.0, -0.5]]]).expand(2, 2, 3)
    alike = Rollout(random(2, 1, 1, 1, *SHAPE).float().expand(2, 2, 1, 3, *SHAPE), [], 0, (1,))
    sums = {}
    for shared in (True, False):
        settings = METHODS["nft_shared"].changed(objective={"shared": shared}).objective
        objective = of_run(settings)
        batch = objective.noised(
            alike, list(advantages.unbind(1)), Draws(0, 0, range(2)), lambda *arguments: None
        )
        weight = torch.ones(SHAPE, requires_grad=True)
        velocity = lambda latents, sigma, prompt, weight=weight: latents * weight
        objective.losses(velocity, None, batch).total.sum().backward()
        sums[shared] = weight.grad.abs().max().item()
    assert sums[True] < 1e-4 and sums[False] > 0.1


def test_an_image_is_noised_the_same_way_whichever_process_has_it():
    objective = of_run(MatchingSettings(trains="noised", trust=1.0, times=2))
    rollout, advantages = images(random(2, 2, 3, seed=6).float())
    both = objective.noised(rollout, advantages, Draws(0, 4, range(3, 5)), lambda *arguments: None)
    second = Rollout(rollout.clean[1:], [], 0, (1,))
    alone = objective.noised(
        second, [each[1:] for each in advantages], Draws(0, 4, range(4, 5)), lambda *arguments: None
    )
    assert torch.equal(both.noise[len(alone) :], alone.noise) and torch.equal(
        both.sigma[len(alone) :], alone.sigma
    )


@pytest.mark.parametrize(
    "draw, share, allowed",
    [
        ("grid", (0.0, 0.99), range(9)),
        ("grid", (0.0, 0.7), range(7)),
        ("grid", (0.95, 1.0), [9]),
        ("grid", (0.91, 0.99), [9]),
        ("strata", (0.05, 0.9), range(1, 9)),
    ],
)
def test_times_come_from_a_share_of_the_grid(draw, share, allowed):
    batch = trained(times=len(allowed) if draw == "grid" else 4, draw=draw, share=share)
    found = {round(time, 5) for time in batch.sigma.tolist()}
    assert found <= {round(SIGMAS[index].item(), 5) for index in allowed}
    rows = batch.sigma.view(12, -1)
    if draw == "grid":
        assert all(len(row.unique()) == len(allowed) for row in rows)
    else:  # one of each quarter
        quarters = [set(SIGMAS[list(part)].tolist()) for part in ((1, 2), (3, 4), (5, 6), (7, 8))]
        assert all(time.item() in quarter for row in rows for time, quarter in zip(row, quarters))


def test_times_may_have_another_density():
    uniform = trained(times=2000, draw="uniform").sigma
    linear = trained(times=2000, draw="linear").sigma
    assert uniform.mean().item() == pytest.approx(
        1 / 2, abs=0.01
    ) and linear.mean().item() == pytest.approx(2 / 3, abs=0.01)
    assert 0 < linear.min() and linear.max() <= 1
    # A part of the way: times from 1/2, where the mean of a density 2t is (2/3) (1 - 1/8) / (1 -
    # 1/4)
    part = trained(times=2000, draw="linear", share=(0.0, 0.5)).sigma
    assert (
        0.5 <= part.min() < 0.51
        and part.max() > 0.99
        and part.mean().item() == pytest.approx(7 / 9, abs=0.01)
    )


def test_updates_on_parts_of_the_group_cover_every_image_once_with_old_velocities():
    objective = of_run(MatchingSettings(trains="noised", trust=1.0, updates_per_rollout=2))
    batch = trained(updates_per_rollout=2)
    torch.testing.assert_close(batch.old, batch.latents * batch.sigma.view(-1, 1, 1))
    velocity = lambda latents, sigma, prompt: latents * sigma.view(-1, 1, 1)
    updates = objective.updates(
        *images(random(2, 2, 3, seed=6).float()), Draws(0, 4, range(3, 5)), velocity
    )
    parts = [part for update in updates for part in update.batches]
    assert [len(part) for part in parts] == [8, 4] == [
        update.num_samples for update in updates
    ] and len(batch) == 12
    assert sorted(torch.cat([part.clean.flatten(1)[:, 0] for part in parts]).tolist()) == sorted(
        batch.clean.flatten(1)[:, 0].tolist()
    )
    assert [len(part) for part in batch.split(5)] == [5, 5, 2] and trained().old is None


def test_the_old_policys_share_rises_and_holds():
    slow = OldPolicy(flat=2, ramp=0.1, hold=0.25)
    assert [slow.decay_at(step) for step in range(6)] == pytest.approx([0, 0, 0, 0.1, 0.2, 0.25])


@pytest.mark.parametrize(
    "settings, problem",
    [
        ({"share": (0.5, 0.5)}, "share: must be two rising numbers"),
        ({"signed": True, "anchor": "base"}, "anchor must be old"),
        ({"loss": "branches", "trust": 1.0}, "an advantage_limit of at most 1"),
        ({"old_coef": 0.1}, "old_coef: without a slow copy"),
    ],
)
def test_settings_that_do_not_fit_together_are_refused(settings, problem):
    with pytest.raises(ValidationError, match=problem):
        MatchingSettings(trains="noised", **settings)


@pytest.mark.parametrize(
    "parts, problem",
    [
        ({"objective": {"trains": "transitions"}}, "none has no transitions to train on"),
        ({"credit": {"reward": "gain"}}, "gain belongs to transitions"),
    ],
)
def test_a_tree_without_noise_needs_an_objective_of_images(parts, problem):
    with pytest.raises(ValidationError, match=problem):
        METHODS["diffusion_nft"].changed(**parts)
