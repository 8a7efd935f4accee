from functools import partial

import pytest
import torch

from g2rpo_core.dynamics import SDES, dpm2
from g2rpo_core.methods import METHODS, Method
from g2rpo_core.rollout import rollout, sample
from g2rpo_core.schedule import shifted_sigmas, sigma_at, tail
from g2rpo_core.tree import build

PROMPTS, GROUP, SHAPE = 2, 3, (16, 32)
MIXED_STEPS = Method(branching="all", noisy_steps=(2, 3, 5), sde="flow", eta=0.7, granularities=(1, 2))
METHODS_HERE = {**METHODS, "mixed": MIXED_STEPS}


class Counting:
    """Counts the latents that go through a velocity field."""

    def __init__(self, velocity):
        self.velocity, self.evaluations, self.largest = velocity, 0, 0

    def __call__(self, latents, sigma, prompt):
        assert len(latents) == len(sigma) == len(prompt)
        self.evaluations += len(latents)
        self.largest = max(self.largest, len(latents))
        return self.velocity(latents, sigma, prompt)


def noise(tree, prompts=PROMPTS, group=GROUP, shape=SHAPE):
    generator = torch.Generator().manual_seed(0)
    initial = torch.randn(prompts, *shape, generator=generator)
    return initial, [torch.randn(prompts, group, *shape, generator=generator) for _ in tree.decisions]


def level(steps):
    return partial(sigma_at, steps=steps, shift=3.0)


def field(latents, sigma, prompt):
    """A cheap nonlinear velocity that depends on everything it may depend on."""
    return torch.sin(latents * (1 + sigma[:, None, None])) + 0.1 * prompt[:, None, None]


@torch.no_grad()
def one_by_one(velocity, method, sigmas, initial, noises, prompts=PROMPTS, group=GROUP):
    """The published loop: every member, branch and granularity by itself, batch 1, nothing shared; clean latents and log-probs."""
    steps = len(sigmas) - 1
    clean, log_probs = [], {}

    at = level(steps)

    def v(x, step, prompt):
        return velocity(x[None], torch.tensor([at(step)]), torch.tensor([prompt]))[0]

    for prompt in range(prompts):
        decision = 0
        for noisy in method.branches(steps):
            for granularity in method.granularities:
                for member in range(group):
                    x = initial[prompt]
                    for step in range(noisy[-1] + 1):
                        velocity_here = v(x, step, prompt)
                        before = x - at(step) * velocity_here
                        if step in noisy:
                            place = decision + noisy.index(step)
                            transition = SDES[method.sde](x[None], velocity_here[None], sigmas, step, method.eta)
                            following = transition.sample(noises[place][prompt, member][None])
                            log_probs[place, prompt, member] = transition.log_prob(following)[0]
                            x = following[0]
                        else:
                            x = x + velocity_here * (sigmas[step + 1] - sigmas[step])
                    path = [noisy[-1], *tail(steps, noisy[-1], granularity, method.grid), steps]
                    for last, here, there in zip(path, path[1:], path[2:]):
                        velocity_here = v(x, here, prompt)
                        x0 = x - at(here) * velocity_here
                        if method.solver == "dpm2":
                            x = dpm2(x, x0, before, (at(last), at(here), at(there)))
                        else:
                            x = x + velocity_here * (at(there) - at(here))
                        before = x0
                    clean.append(x)
            decision += len(noisy)
    branches = len(method.branches(steps))
    return torch.stack(clean).view(prompts, branches, len(method.granularities), group, *clean[0].shape), log_probs


@pytest.mark.parametrize("name, evaluations", [("g2rpo", 1700), ("g2rpo_no_mgai", 1112), ("dance_grpo", 181)])
def test_the_model_is_called_exactly_as_often_as_counted(name, evaluations):
    method, sigmas = METHODS[name], shifted_sigmas(16, 3.0)
    tree = build(method.branches(16), method.granularities, 16, method.grid)
    initial, noises = noise(tree, 1, 12, (4, 2))
    counting = Counting(field)
    result = rollout(counting, tree, level(16), method.transition(sigmas), initial, noises, max_batch=100)
    assert counting.evaluations == result.evaluations == evaluations
    assert counting.largest <= 100


@pytest.mark.parametrize("max_batch", [1, 7, 10_000])
@pytest.mark.parametrize("grid", ["released", "paper", "even"])
@pytest.mark.parametrize("name", METHODS_HERE)
def test_batched_tree_equals_the_naive_loop(name, grid, max_batch):
    method, sigmas = METHODS_HERE[name].model_copy(update={"grid": grid}), shifted_sigmas(10, 3.0)
    if name != "mixed":
        method = method.model_copy(update={"noisy_steps": tuple(range(6)) if method.branching == "each" else "all"})
    tree = build(method.branches(10), method.granularities, 10, method.grid)
    initial, noises = noise(tree)
    ours = rollout(field, tree, level(10), method.transition(sigmas), initial, noises, max_batch, method.solver)
    clean, log_probs = one_by_one(field, method, sigmas, initial, noises)
    torch.testing.assert_close(ours.clean, clean, rtol=1e-4, atol=1e-5)
    assert len(log_probs) == len(ours.taken) * PROMPTS * GROUP
    for (place, prompt, member), expected in log_probs.items():
        torch.testing.assert_close(ours.taken[place].log_prob[prompt, member], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", METHODS)
def test_flux_in_one_big_batch_equals_one_by_one(policy, embeddings, name):
    method, sigmas = METHODS[name].model_copy(update={"noisy_steps": (0, 2)}), shifted_sigmas(6, 3.0)
    tree = build(method.branches(6), method.granularities, 6, method.grid)
    initial, noises = noise(tree)
    velocity = policy.velocity(embeddings.conditioning([3, 11]))
    ours = rollout(velocity, tree, level(6), method.transition(sigmas), initial, noises, 1000, method.solver)
    clean, _ = one_by_one(velocity, method, sigmas, initial, noises)
    assert clean.std() > 0.1
    torch.testing.assert_close(ours.clean, clean, rtol=1e-4, atol=1e-4)


def test_members_of_a_group_share_their_state_and_differ_after_it():
    method = METHODS["g2rpo"]
    tree = build(method.branches(16), method.granularities, 16)
    initial, noises = noise(tree)
    sigmas = shifted_sigmas(16, 3.0)
    result = rollout(field, tree, level(16), method.transition(sigmas), initial, noises, 500)
    for taken in result.taken:
        assert taken.latents.shape == (PROMPTS, 1, *SHAPE)
        assert taken.next_latents.shape == (PROMPTS, GROUP, *SHAPE)
        assert (taken.next_latents[:, 0] != taken.next_latents[:, 1]).any()
    assert torch.equal(result.taken[0].latents[:, 0], initial)


def test_sampling_solves_the_ode():
    target = torch.randn(3, 4, 2)
    straight = sample(
        lambda x, sigma, prompt: (x - target[prompt]) / sigma[:, None, None],
        torch.randn(3, 4, 2),
        shifted_sigmas(8, 3.0).tolist(),
        2,
    )
    torch.testing.assert_close(straight, target, rtol=1e-4, atol=1e-4)
