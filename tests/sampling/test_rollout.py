import pytest
import torch

from g2rpo_core.algorithm.methods import METHODS, Method
from g2rpo_core.sampling.ode import dpm2
from g2rpo_core.sampling.rollout import _next_call, num_calls, rollout, sample
from g2rpo_core.sampling.schedule import shifted_sigmas, tail
from g2rpo_core.sampling.transitions import SDES
from tests.fixtures.rollouts import GROUP, PROMPTS, SHAPE, noise, sigma_of

FLOW = {"sde": "flow", "eta": 0.7}
MADE_UP = {  # what no published method has, and the size of its group
    "mixed": ({"branching": "all", "sde_steps": (2, 3, 5), "granularities": (1, 2)}, 3),
    "two noises": (
        {"branching": "each", "sde_steps": (0, 2, 5), "granularities": (1, 2), "initial_noises": 2},
        6,
    ),
    "a noise each": ({"branching": "all", "sde_steps": (1, 4), "initial_noises": "each"}, 3),
    "late splits": (
        {"branching": "splits", "sde_steps": "all", "splits": (1, 4), "granularities": (1, 3)},
        4,
    ),
    "two noises and splits": (
        {"branching": "splits", "sde_steps": (0, 2, 3, 6), "splits": (2, 6), "initial_noises": 2},
        8,
    ),
    "two noises, second order": (
        {
            "branching": "each",
            "sde_steps": (0, 2, 5),
            "granularities": (1, 3),
            "initial_noises": 2,
            "solver": "dpm2",
        },
        6,
    ),
    "a window of one step, second order": (
        {
            "branching": "all",
            "sde_steps": (2,),
            "granularities": (2,),
            "initial_noises": 3,
            "solver": "dpm2",
        },
        6,
    ),
    "a split at the last noise, second order": (
        {
            "branching": "splits",
            "sde_steps": (0, 1, 5),
            "splits": (0, 5),
            "granularities": (1, 2),
            "solver": "dpm2",
        },
        9,
    ),
    "long steps": (
        {"branching": "each", "sde_steps": (0, 2, 5), "spans": (2, 3, 4), "granularities": (1, 2)},
        3,
    ),
}
GROUPS = {"branch_grpo": 16, "tempflow_grpo": 8}  # what needs more than GROUP
CASES = {
    name: (method, GROUPS.get(name, GROUP))
    for name, method in METHODS.items()
    if method.tree.branching != "none"
}
CASES |= {name: (Method(tree=FLOW | tree), group) for name, (tree, group) in MADE_UP.items()}


class Counting:
    """Counts the latents that go through a velocity field."""

    def __init__(self, velocity):
        self.velocity, self.num_forward_evals, self.largest, self.calls = velocity, 0, 0, 0

    def __call__(self, latents, sigma, prompt):
        assert len(latents) == len(sigma) == len(prompt)
        self.num_forward_evals += len(latents)
        self.calls += 1
        self.largest = max(self.largest, len(latents))
        return self.velocity(latents, sigma, prompt)


def field(latents, sigma, prompt):
    """A cheap nonlinear velocity that depends on everything it may depend on."""
    return torch.sin(latents * (1 + sigma[:, None, None])) + 0.1 * prompt[:, None, None]


@torch.no_grad()
def one_by_one(velocity, method, sigmas, initial, noises, prompts=PROMPTS, group=GROUP):
    """Roll out as the published loop does: every member, branch and granularity alone.

    Clean latents, log-probabilities by SDE step, prompt and member, and the clean predictions
    before and after each SDE step.
    """
    steps = len(sigmas) - 1
    clean, log_probs, around = [], {}, {}
    spans = method.tree.spans_at(steps)
    of_member = lambda rows, member: rows[
        member * len(rows) // group
    ]  # those that members share stand in their order

    sigma = sigma_of(steps)

    def velocity_at(x, step, prompt):
        return velocity(x[None], torch.tensor([sigma(step)]), torch.tensor([prompt]))[0]

    for prompt in range(prompts):
        first = 0  # index of the branch's first SDE step among those of all branches
        for sde_steps in method.tree.branches(steps):
            for granularity in method.tree.granularities:
                for member in range(group):
                    x, step, before = of_member(initial[prompt], member), 0, None
                    end = sde_steps[-1] + spans.get(sde_steps[-1], 1)
                    while step < end:
                        v = velocity_at(x, step, prompt)
                        before = x - sigma(step) * v
                        if step in sde_steps:
                            index, span = first + sde_steps.index(step), spans.get(step, 1)
                            transition = SDES[method.tree.sde](
                                x[None], v[None], sigmas, step, method.tree.eta, span
                            )
                            following = transition.sample(
                                of_member(noises[index][prompt], member)[None]
                            )
                            log_probs[index, prompt, member] = transition.log_prob(following)[0]
                            x, step = following[0], step + span
                            after = x - sigma(step) * velocity_at(x, step, prompt)
                            around[index, prompt, member] = before, after
                        else:
                            x, step = x + v * (sigmas[step + 1] - sigmas[step]), step + 1
                    path = [
                        sde_steps[-1],
                        *tail(steps, end - 1, granularity, method.tree.grid),
                        steps,
                    ]
                    for last, step, following_step in zip(path, path[1:], path[2:]):
                        v = velocity_at(x, step, prompt)
                        x0 = x - sigma(step) * v
                        if method.tree.solver == "dpm2":
                            x = dpm2(
                                x, x0, before, (sigma(last), sigma(step), sigma(following_step))
                            )
                        else:
                            x = x + v * (sigma(following_step) - sigma(step))
                        before = x0
                    clean.append(x)
            first += len(sde_steps)
    branches = len(method.tree.branches(steps))
    finished = torch.stack(clean).view(
        prompts, branches, len(method.tree.granularities), group, *clean[0].shape
    )
    return finished, log_probs, around


@pytest.mark.parametrize(
    "name, num_forward_evals", [("g2rpo", 1700), ("g2rpo_no_mgai", 1112), ("dance_grpo", 181)]
)
def test_the_model_is_called_exactly_as_often_as_counted(name, num_forward_evals):
    method, sigmas = METHODS[name], shifted_sigmas(16, 3.0)
    tree = method.tree.build(16)
    initial, noises = noise(tree, 1, 12, (4, 2))
    counting = Counting(field)
    result = rollout(
        counting, tree, sigma_of(16), method.tree.transition(sigmas), initial, noises, max_batch=100
    )
    assert counting.num_forward_evals == result.num_forward_evals == num_forward_evals
    assert counting.largest <= 100 and counting.calls == num_calls(tree, 1, 12, 100)


@pytest.mark.parametrize(
    "name, grid, max_batch",
    [
        *((name, "released", 7) for name in CASES),
        *(("g2rpo", grid, batch) for grid in ("paper", "even") for batch in (1, 10_000)),
    ],
)
def test_batched_tree_equals_the_naive_loop(name, grid, max_batch):
    method, group = CASES[name]
    method, sigmas = method.changed(tree={"grid": grid}), shifted_sigmas(12, 3.0)
    tree = method.tree.build(12)
    initial, noises = noise(tree, PROMPTS, group, (4, 2))
    counting = Counting(field)
    ours = rollout(
        counting,
        tree,
        sigma_of(12),
        method.tree.transition(sigmas),
        initial,
        noises,
        max_batch,
        method.tree.solver,
        predictions=True,
    )
    assert counting.calls == num_calls(tree, PROMPTS, group, max_batch)
    assert counting.num_forward_evals == PROMPTS * tree.num_forward_evals(group)
    clean, log_probs, around = one_by_one(field, method, sigmas, initial, noises, group=group)
    torch.testing.assert_close(ours.clean, clean, rtol=1e-4, atol=1e-5)
    assert len(log_probs) == len(ours.transitions) * PROMPTS * group
    of_member = lambda rows, member: rows[member * len(rows) // group]
    for (index, prompt, member), expected in log_probs.items():
        sampled = ours.transitions[index]
        torch.testing.assert_close(
            of_member(sampled.log_prob[prompt], member), expected, rtol=1e-4, atol=1e-5
        )
        for ends, prediction in zip(ours.around[index], around[index, prompt, member]):
            torch.testing.assert_close(
                of_member(ends[prompt], member), prediction, rtol=1e-4, atol=1e-4
            )


def test_states_are_sampled_once_until_they_split():
    """BranchGRPO's tree: 1, 2, 4, 8 and 16 states, and as many next states as then."""
    tree = METHODS["branch_grpo"].tree.build(20)
    initial, noises = noise(tree, 1, 16, (4, 2))
    sigmas = shifted_sigmas(20, 3.0)
    sampled = rollout(
        field,
        tree,
        sigma_of(20),
        METHODS["branch_grpo"].tree.transition(sigmas),
        initial,
        noises,
        1000,
    ).transitions
    states = [1, 2, 2, 2, 4, 4, 4, 8, 8, 8] + [16] * 9
    assert [each.latents.shape[1] for each in sampled] == states
    assert [each.next_latents.shape[1] for each in sampled] == [*states[1:], 16]
    assert all(
        each.next_latents[0].unique(dim=0).shape[0] == each.next_latents.shape[1]
        for each in sampled
    )


@pytest.mark.parametrize("name", [name for name in METHODS if name in CASES])
def test_flux_in_one_big_batch_equals_one_by_one(policy, embeddings, name):
    tree = METHODS[name].tree
    fits = (
        {"spans": (1, 3)}
        if getattr(tree, "spans", None)
        else {"splits": (0, 2)}
        if tree.split_steps()
        else {}
    )
    method, sigmas = (
        METHODS[name].changed(tree={"sde_steps": (0, 2), **fits}),
        shifted_sigmas(6, 3.0),
    )
    group = 4 if name in GROUPS else GROUP
    tree = method.tree.build(6)
    initial, noises = noise(tree, group=group)
    velocity = policy.velocity(embeddings.conditioning([3, 11]))
    ours = rollout(
        velocity,
        tree,
        sigma_of(6),
        method.tree.transition(sigmas),
        initial,
        noises,
        1000,
        method.tree.solver,
    )
    clean, _, _ = one_by_one(velocity, method, sigmas, initial, noises, group=group)
    assert clean.std() > 0.1
    torch.testing.assert_close(ours.clean, clean, rtol=1e-4, atol=1e-4)


def test_members_of_a_group_share_their_state_and_differ_after_it():
    method = METHODS["g2rpo"]
    tree = method.tree.build(16)
    initial, noises = noise(tree)
    sigmas = shifted_sigmas(16, 3.0)
    result = rollout(
        field, tree, sigma_of(16), method.tree.transition(sigmas), initial, noises, 500
    )
    for sampled in result.transitions:
        assert sampled.latents.shape == (PROMPTS, 1, *SHAPE)
        assert sampled.next_latents.shape == (PROMPTS, GROUP, *SHAPE)
        assert (sampled.next_latents[:, 0] != sampled.next_latents[:, 1]).any()
    assert torch.equal(result.transitions[0].latents, initial)


def test_sampling_solves_the_ode():
    target = torch.randn(3, 4, 2)
    straight = sample(
        lambda x, sigma, prompt: (x - target[prompt]) / sigma[:, None, None],
        torch.randn(3, 4, 2),
        shifted_sigmas(8, 3.0).tolist(),
        2,
    )
    torch.testing.assert_close(straight, target, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["g2rpo", "dance_grpo", "branch_grpo"])
def test_a_call_takes_the_earliest_steps_and_no_more_than_fits(name):
    """One node alone may be larger, and is then split."""
    method, group = CASES[name]
    tree = method.tree.build(12)
    ready = {index: width for index, width in enumerate(tree.widths(group))}
    chosen = _next_call(ready, tree, 10)
    assert len(chosen) == 1 or sum(ready[index] for index in chosen) <= 10
    earliest = min(tree.nodes[index].step for index in ready)
    assert tree.nodes[chosen[0]].step == earliest
    left = sorted((tree.nodes[index].step, ready[index]) for index in ready if index not in chosen)
    assert all(
        sum(ready[index] for index in chosen) + width > 10
        for step, width in left
        if step == earliest
    )


@pytest.mark.parametrize("solver", ["euler", "dpm2"])
def test_a_tree_without_noise_samples_every_member_as_the_solver_alone(solver):
    """By Euler's steps it is `sample`; the second order differs from it."""
    tree = METHODS["diffusion_nft"].tree.build(5)
    initial, noises = noise(tree)
    velocity = lambda x, sigma, prompt: x * (1 + sigma.view(-1, 1, 1) ** 2) + prompt.view(-1, 1, 1)
    found = rollout(velocity, tree, sigma_of(5), None, initial, noises, 4, solver)
    assert found.clean.shape[:4] == (PROMPTS, 1, 1, GROUP) and not found.transitions and not noises
    assert found.num_forward_evals == tree.num_forward_evals(GROUP) * PROMPTS == 5 * GROUP * PROMPTS
    for member in range(GROUP):
        alone = sample(velocity, initial[:, member], [sigma_of(5)(step) for step in range(6)], 8)
        assert torch.allclose(found.clean[:, 0, 0, member], alone, atol=1e-5) == (solver == "euler")
