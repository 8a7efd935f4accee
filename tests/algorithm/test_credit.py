"""Credit assignment and weights by hand: trees, initial noises, batches, gains."""

import random
from functools import partial

import pytest
import torch

from g2rpo_core.algorithm.advantage import branch_advantages
from g2rpo_core.algorithm.batch import Draws, TrainedTransition, transition_batches
from g2rpo_core.algorithm.credit import CreditAssignment, batch_deviation
from g2rpo_core.algorithm.methods import METHODS, Method
from g2rpo_core.algorithm.objective import draw_by_member, noise_weights
from g2rpo_core.distributed.process_group import ALONE, ProcessGroup
from g2rpo_core.sampling.rollout import SampledTransition
from g2rpo_core.sampling.schedule import shifted_sigmas
from g2rpo_core.sampling.tree import SDEStep
from g2rpo_core.training.experience import score_gains, score_rollout
from tests.fixtures.rollouts import redness, small_method


def scorer(policy):
    """`score_rollout` by redness, of two prompts."""
    return partial(
        score_rollout, policy, {"redness": redness}, texts=["a", "b"], decode_batch=16, iteration=0
    )


def advantages_by(method, transitions, rewards, gains=None, weights=(1.0,), processes=ALONE):
    """The advantages of transitions as the trainer's objective computes them, hardly clipped."""
    credit = CreditAssignment(method.credit, method.groups, weights, 100.0, processes)
    return credit.of_transitions(transitions, rewards, gains)


PLAIN = Method(tree={"branching": "all", "sde_steps": "all", "sde": "flow", "eta": 0.7})


def sampled(*widths: tuple[int, int], prompts: int = 1) -> list[SampledTransition]:
    """Transitions of one branch from so many states to so many next ones."""
    return [
        SampledTransition(
            SDEStep(0, step, 1),
            torch.randn(prompts, before, 2),
            torch.zeros(prompts, before, 2),
            torch.randn(prompts, after, 2),
            torch.zeros(prompts, after),
        )
        for step, (before, after) in enumerate(widths)
    ]


def z(*values: float) -> torch.Tensor:
    """Standardized by their own mean and deviation."""
    numbers = torch.tensor(values, dtype=torch.float32)
    return (numbers - numbers.mean()) / numbers.std()


LEAVES = torch.tensor([1.0, 3.0, 2.0, 6.0]).view(1, 1, 1, 1, 4)  # R, P, B, J, G
TREE = PLAIN.changed(tree={"branching": "splits", "splits": (0, 2)})


def test_a_shared_state_has_its_members_mean_reward_compared_with_its_siblings():
    """BranchGRPO: depth by depth; the first two states have 2 and 4 on average."""
    found = advantages_by(TREE, sampled((1, 2), (2, 2), (2, 4), (4, 4)), LEAVES)
    for advantages, expected in zip(found, (z(2, 4), z(2, 4), z(1, 3, 2, 6), z(1, 3, 2, 6))):
        torch.testing.assert_close(advantages[0], expected)


def test_or_it_has_the_mean_of_its_members_advantages():
    """TreeGRPO: from the leaves backwards."""
    method = TREE.changed(credit={"node_advantages": "mean"})
    shared, own = advantages_by(method, sampled((1, 2), (2, 4)), LEAVES)
    torch.testing.assert_close(own[0], z(1, 3, 2, 6))
    torch.testing.assert_close(shared[0], torch.stack([own[0, :2].mean(), own[0, 2:].mean()]))


def test_one_state_alone_is_compared_with_nothing():
    (alone,) = advantages_by(TREE, sampled((1, 1)), LEAVES)
    assert alone.tolist() == [[0.0]]


def test_members_are_compared_with_those_of_their_own_initial_noise():
    method = PLAIN.changed(tree={"initial_noises": 2})
    (together,) = advantages_by(method, sampled((2, 4)), LEAVES)
    torch.testing.assert_close(together[0], z(1, 3, 2, 6))
    (apart,) = advantages_by(method.changed(credit={"compared": "noise"}), sampled((2, 4)), LEAVES)
    torch.testing.assert_close(apart[0], torch.cat([z(1, 3), z(2, 6)]))


def test_the_deviation_may_be_that_of_all_rewards_of_all_processes(monkeypatch):
    """flow_grpo: each group's own mean, one deviation (ddof 0) over all processes."""
    rewards = torch.randn(2, 4, 1, 1, 3, generator=torch.Generator().manual_seed(0))
    method = PLAIN.changed(credit={"deviation": "batch"})
    three = sampled((1, 3), prompts=4)
    (whole,) = advantages_by(method, three, rewards, weights=[1.0, 0.5])
    away = (rewards - rewards.mean(-1, keepdim=True))[:, :, 0, 0]
    stds = rewards.flatten(1).std(1, correction=0)
    torch.testing.assert_close(whole, away[0] / (stds[0] + 1e-4) + 0.5 * away[1] / (stds[1] + 1e-4))
    halves = rewards.split(2, 1)
    monkeypatch.setattr(
        ProcessGroup,
        "gather",
        lambda self, value: [half.transpose(1, 3).flatten(2) for half in halves],
    )
    for rank, half in enumerate(halves):
        (part,) = advantages_by(
            method, sampled((1, 3), prompts=2), half, None, [1.0, 0.5], ProcessGroup(rank, 2)
        )
        torch.testing.assert_close(part, whole[2 * rank : 2 * rank + 2])
    assert batch_deviation(rewards, ALONE).shape == (2, 1, 1, 1)


def test_of_several_rewards_the_sum_is_standardized_or_each_by_itself():
    """Flow-GRPO: a reward of large spread dominates; MixGRPO, GDPO: the weights alone count."""
    rewards = torch.tensor([[1.0, 3.0, 2.0, 6.0], [100.0, 400.0, 300.0, 200.0]])
    found = {}
    for reward_aggr in ("rewards", "advantages"):
        method = PLAIN.changed(credit={"reward_aggr": reward_aggr})
        (found[reward_aggr],) = advantages_by(
            method, sampled((1, 4)), rewards.view(2, 1, 1, 1, 4), weights=[1.0, 0.5]
        )
    torch.testing.assert_close(found["rewards"][0], z(*(rewards[0] + 0.5 * rewards[1]).tolist()))
    torch.testing.assert_close(
        found["advantages"][0], z(*rewards[0].tolist()) + 0.5 * z(*rewards[1].tolist())
    )
    assert found["rewards"].std() == pytest.approx(1) and PLAIN.credit.reward_aggr == "advantages"
    gains = [rewards.view(2, 1, 4), -rewards.view(2, 1, 4)]
    method = PLAIN.changed(credit={"reward": "gain", "reward_aggr": "rewards"})
    of_steps = advantages_by(
        method, sampled((1, 4), (4, 4)), torch.zeros(2, 1, 1, 1, 4), gains, [1.0, 0.5]
    )
    summed = rewards[0] + 0.5 * rewards[1]
    torch.testing.assert_close(torch.cat(of_steps, -1)[0], z(*summed.tolist(), *(-summed).tolist()))
    of_sum = {name for name, method in METHODS.items() if method.credit.reward_aggr == "rewards"}
    noised = {"diffusion_nft", "awm", "nft_shared", "nft_leaves"}
    assert of_sum - noised == {
        "flow_grpo",
        "flow_grpo_fast",
        "grpo_guard",
        "tempflow_grpo",
        "flow_dppo",
        "stepwise_flow_grpo",
    }


def last_bits(rewards: torch.Tensor) -> torch.Tensor:
    """Move every value by up to two units in its last place, as another call of a scorer would."""
    found = rewards.clone().float()
    steps = torch.randint(-2, 3, rewards.shape, generator=torch.Generator().manual_seed(0))
    for count in (1, 2):
        found = torch.where(steps >= count, torch.nextafter(found, torch.tensor(torch.inf)), found)
        found = torch.where(
            steps <= -count, torch.nextafter(found, torch.tensor(-torch.inf)), found
        )
    return found


@pytest.mark.parametrize("name", METHODS)
def test_equal_images_have_no_advantage_by_any_method(name):
    """Also where rewards cancel in their sum."""
    method = METHODS[name]
    equal = last_bits(torch.tensor([0.3, 0.2, 21.7]).view(3, 1, 1, 1, 1).expand(3, 2, 3, 2, 12))
    credit = CreditAssignment(method.credit, method.groups, [1.0, -1.5, 0.5], 5.0)
    gains = None
    if (
        method.credit.needs_predictions
    ):  # a gain of .001, far below the scores that it is a difference of
        gains = [last_bits(equal[:, :, 0, 0] + 0.001) - equal[:, :, 0, 0] for _ in range(2)]
    assert not any(
        part.any()
        for part in credit.of_transitions(sampled((1, 12), (12, 12), prompts=2), equal, gains)
    )
    assert not credit.of_images(equal).any()
    if gains is None:
        shared = credit.of_transitions(sampled((1, 3 * method.groups), prompts=2), equal, None)
        assert not any(part.any() for part in shared)


def test_groups_are_standardized_by_themselves_whatever_their_number():
    rewards = torch.randn(2, 3, 2, 2, 6, generator=torch.Generator().manual_seed(0))
    apart = branch_advantages(rewards, [1.0, 2.0], 100.0, groups=3)
    for part in range(3):
        members = slice(2 * part, 2 * part + 2)
        torch.testing.assert_close(
            apart[..., members], branch_advantages(rewards[..., members], [1.0, 2.0], 100.0)
        )


def test_a_step_may_have_the_gain_of_the_clean_prediction_as_its_reward(
    make_trainer, embeddings, policy
):
    """Neighbouring gains add up to the reward of the image minus that of the first prediction."""
    trainer = make_trainer(small_method("stepwise_flow_grpo"))
    conditioning = embeddings.conditioning([0, 1])
    rollout = trainer.sampler(conditioning, 0)
    images = lambda latents: policy.decode(latents.flatten(0, 1), 16)
    scores = lambda latents: redness(images(latents), None).view(latents.shape[:2])
    gains = score_gains(rollout, scorer(policy))
    assert [tuple(gain.shape) for gain in gains] == [(1, 2, 3)] * 5
    for gain, (before, after) in zip(gains, rollout.around):
        torch.testing.assert_close(gain[0], scores(after) - scores(before), rtol=1e-4, atol=1e-5)
    total = scores(rollout.clean[:, 0, 0]) - scores(rollout.around[0][0])
    torch.testing.assert_close(sum(gains)[0], total, rtol=1e-4, atol=1e-5)
    found = advantages_by(trainer.method, rollout.transitions, torch.zeros(1, 2, 1, 1, 3), gains)
    together = torch.stack(gains, 2)[0].flatten(1)  # [P, steps x members]
    for prompt in range(2):
        mine = torch.cat([advantages[prompt] for advantages in found])
        torch.testing.assert_close(mine, z(*together[prompt].tolist()), rtol=1e-3, atol=1e-4)


def test_gains_of_all_steps_are_compared_together_so_small_ones_stay_small():
    """Stepwise-Flow-GRPO: one mean and one deviation over all steps of a group."""
    gains = [torch.tensor([[[4.0, -4.0, 2.0, 0.0]]]), torch.tensor([[[1.0, -1.0, 1.0, 1.0]]])]
    method, nothing = PLAIN.changed(credit={"reward": "gain"}), torch.zeros(1, 1, 1, 1, 4)
    early, late = advantages_by(method, sampled((1, 4), (4, 4)), nothing, gains)
    torch.testing.assert_close(torch.cat([early, late], -1)[0], z(4, -4, 2, 0, 1, -1, 1, 1))
    assert early.std() / late.std() == pytest.approx((gains[0].std() / gains[1].std()).item())
    by_noise = method.changed(tree={"initial_noises": 2}, credit={"compared": "noise"})
    early, late = advantages_by(by_noise, sampled((2, 4), (4, 4)), nothing, gains)
    torch.testing.assert_close(torch.cat([early[0, :2], late[0, :2]]), z(4, -4, 1, -1))
    torch.testing.assert_close(torch.cat([early[0, 2:], late[0, 2:]]), z(2, 0, 1, 1))
    tree = TREE.changed(credit={"reward": "gain"})
    shared, own = advantages_by(
        tree, sampled((1, 2), (2, 4)), nothing, [gains[0][..., :2], gains[1]]
    )
    torch.testing.assert_close(torch.cat([shared, own], -1)[0], z(4, -4, 1, -1, 1, 1))


def test_a_shared_prediction_is_the_one_before_the_gain_of_each_of_its_next_states(
    make_trainer, embeddings, policy
):
    trainer = make_trainer(
        small_method("branch_grpo", tree={"splits": (0, 2)}, credit={"reward": "gain"}),
        num_generations=4,
    )
    rollout = trainer.sampler(embeddings.conditioning([0, 1]), 0)
    scores = lambda latents: redness(policy.decode(latents.flatten(0, 1), 16), None).view(
        latents.shape[:2]
    )
    gains = score_gains(rollout, scorer(policy))
    before, after = rollout.around[2]
    assert before.shape[1] == 2 and after.shape[1] == 4
    expected = scores(after) - scores(before)[:, [0, 0, 1, 1]]
    torch.testing.assert_close(gains[2][0], expected, rtol=1e-4, atol=1e-5)


def test_a_part_of_the_members_keeps_the_states_that_they_came_from():
    (transition,) = sampled((2, 4))
    part = transition.members(torch.tensor([1, 2]))
    assert torch.equal(part.latents, transition.latents[:, [0, 1]]) and torch.equal(
        part.mean, transition.mean[:, [0, 1]]
    )
    assert torch.equal(part.next_latents, transition.next_latents[:, [1, 2]])
    assert torch.equal(transition.members(slice(1, 3)).latents, transition.latents[:, [0, 1]])


def test_a_slice_that_splits_no_group_keeps_each_state_once():
    (transition,) = sampled((2, 4))
    part = transition.members(slice(2, 4))
    assert torch.equal(part.latents, transition.latents[:, [1]]) and torch.equal(
        part.mean, transition.mean[:, [1]]
    )
    assert (
        torch.equal(part.next_latents, transition.next_latents[:, 2:])
        and part.members_of_state == 2
    )


def test_a_step_may_weigh_as_its_noise_does(make_trainer, embeddings):
    """Normalized over all steps that may be drawn, also if an iteration draws one of them."""
    assert noise_weights({4: 0.3, 7: 0.1}) == pytest.approx({4: 1.5, 7: 0.5})  # 1 on average
    window = {"size": 1, "order": "scattered"}
    method = small_method(
        "tempflow_grpo", tree={"sde_steps": (0, 2, 3), "window": window, "initial_noises": 1}
    )
    trainer = make_trainer(method)
    sigmas = shifted_sigmas(6, 3.0)
    noise = lambda step: (
        sigmas[step] / (1 - sigmas[max(step, 1)]) * (sigmas[step] - sigmas[step + 1])
    )  # squared, over eta squared
    expected, seen = noise_weights({step: noise(step).item() ** 0.5 for step in (0, 2, 3)}), {}
    for iteration in range(12):
        rollout = trainer.sampler(embeddings.conditioning([0, 1]), iteration)
        (trained,) = trainer.objective.draw(
            rollout.transitions, [torch.zeros(2, 3)], Draws(1, 0, range(2))
        )
        seen[trained.sampled.sde_step.step] = trained.weights.unique().item()
    assert seen == pytest.approx(expected) and expected[0] > expected[2] > expected[3]


def test_the_weights_of_steps_leave_the_divergence_alone(make_trainer, embeddings, policy):
    """TempFlow-GRPO weighs the policy loss, not the KL: without advantages, nothing changes."""
    norms = {}
    for weights in ("equal", "noise"):
        method = small_method("g2rpo", objective={"step_weights": weights, "kl_coef": 1.0})
        trainer = make_trainer(method, max_grad_norm=1e9)
        with torch.no_grad():
            policy.transformer.proj_out.bias.add_(0.1)
        conditioning = embeddings.conditioning([0, 1])
        rollout = trainer.sampler(conditioning, 0)
        none = [torch.zeros(2, 3)] * len(rollout.transitions)
        (update, *_) = trainer.updates(conditioning, rollout, none, Draws(1, 0, range(2)))
        trainer.optimizer.step = lambda: None
        norms[weights] = trainer.update(conditioning, update)["grad_norm"]
        with torch.no_grad():
            policy.transformer.proj_out.bias.sub_(0.1)
    assert norms["noise"] == pytest.approx(norms["equal"], rel=1e-4) and norms["equal"] > 0


def test_the_share_of_steps_is_drawn_for_the_group_or_for_each_member(make_trainer, embeddings):
    method = PLAIN.changed(objective={"timestep_fraction": 0.6})
    of_member = draw_by_member(method.objective, 10, 3, [random.Random(4), random.Random(5)])
    assert (
        of_member.shape == (10, 2, 3) and (of_member.sum(0) == 6).all()
    )  # everyone trains on as many
    assert len(of_member.flatten(1).T.unique(dim=0)) > 3  # but not on the same ones
    counts = {}
    for timesteps_of in ("group", "member"):
        trainer = make_trainer(small_method("dance_grpo", objective={"timesteps_of": timesteps_of}))
        rollout = trainer.sampler(embeddings.conditioning([0, 1]), 0)
        trained = trainer.objective.draw(
            rollout.transitions, [torch.zeros(2, 3)] * 5, Draws(1, 0, range(2))
        )
        counts[timesteps_of] = torch.stack([each.weights for each in trained])
    assert (counts["group"] == 1).all() and len(counts["group"]) == 3
    assert len(counts["member"]) == 5 and (counts["member"].sum(0) == 3).all()


def test_states_of_weight_zero_are_left_out_unless_another_process_needs_them(monkeypatch):
    one, other = sampled((3, 3), (1, 3))
    weights = torch.tensor([[1.0, 0.0, 1.0]])
    transitions = [
        TrainedTransition(one, torch.arange(3.0)[None], weights),
        TrainedTransition(other, torch.zeros(1, 3), weights),
    ]
    shared, apart = transition_batches(transitions, ALONE)
    assert [len(batch.latents) for batch in transition_batches(transitions)] == [
        1,
        3,
    ]  # all, where nothing is drawn by members
    assert shared.weights.tolist() == weights.tolist()  # the state that all depart from has one row
    assert torch.equal(apart.latents, one.latents[0, [0, 2]]) and apart.weights.tolist() == [
        [1.0],
        [1.0],
    ]
    monkeypatch.setattr(ProcessGroup, "gather", lambda self, value: [value, 3])
    (_, padded) = transition_batches(transitions, ProcessGroup(0, 2))
    assert padded.weights.tolist() == [
        [1.0],
        [0.0],
        [1.0],
    ]  # the same number of calls, and nothing of it in the loss


def test_a_weight_of_zero_leaves_a_transition_out_of_loss_and_gradient(
    make_trainer, embeddings, policy
):
    """Half the members with a weight of 0: the same as if they were not there."""
    conditioning = embeddings.conditioning([0, 1])
    trainer = make_trainer(
        small_method("mix_grpo", objective={"timesteps_of": "member"}), max_grad_norm=1e9
    )
    trainer.optimizer.step = lambda: None
    (first, second, *_) = trainer.sampler(conditioning, 0).transitions
    advantages = torch.randn(2, 3, generator=torch.Generator().manual_seed(0))
    weights = torch.tensor([[1.0, 0.0, 1.0]]).expand(2, 3)
    results = []
    for transitions in (
        [TrainedTransition(each, advantages, weights) for each in (first, second)],
        [
            TrainedTransition(
                each.members(torch.tensor([0, 2])), advantages[:, [0, 2]], torch.ones(2, 2)
            )
            for each in (first, second)
        ],
    ):
        measured = trainer.update(conditioning, trainer.objective.update(transitions))
        results.append((measured["loss"], policy.transformer.proj_out.weight.grad.clone()))
    assert results[0][0] == pytest.approx(results[1][0], rel=1e-4)
    torch.testing.assert_close(results[0][1], results[1][1], rtol=1e-3, atol=1e-6)


def test_long_steps_are_trained_as_they_were_sampled(make_trainer):
    """The first ratio is 1, so the update uses the transition of the rollout."""
    method = small_method("e_grpo", tree={"sde_steps": (0, 2), "spans": (2, 3)})
    records = list(make_trainer(method, learning_rate=1e-3).run())
    assert records[0]["old_policy_ratio_error"] < 2e-5 and records[0]["num_transitions"] == 2 * 2


@pytest.mark.parametrize(
    "name", ["branch_grpo", "tempflow_grpo", "flow_dppo", "stepwise_flow_grpo", "g2rpo_coarse"]
)
def test_a_method_of_this_year_trains(make_trainer, name):
    changes = {"tree": {"splits": (0, 2)}} if name == "branch_grpo" else {}
    fits = {"num_generations": 4} if name == "branch_grpo" else {}
    records = list(make_trainer(small_method(name, **changes), learning_rate=1e-3, **fits).run())
    assert all(
        record["old_policy_ratio_error"] < 1e-4 and record["grad_norm"] > 0 for record in records
    )


def test_the_mask_counts_what_it_drops_which_is_nothing_before_the_policy_moves(make_trainer):
    method = small_method("flow_dppo", objective={"updates_per_rollout": 2, "kl_mask": 1e-30})
    trainer = make_trainer(method, learning_rate=1e-3, iterations=1, num_generations=4)
    shares: list[float] = []
    update = trainer.update
    trainer.update = lambda *words: (
        shares.append((measured := update(*words))["clip_ratio"]) or measured
    )
    list(trainer.run())
    assert shares[1] > 0.2 and len(shares) == 2


def test_noise_is_larger_where_states_split_and_its_density_is_not(make_trainer, embeddings):
    """As in BranchGRPO's code."""
    plain, wide = (
        make_trainer(
            small_method("branch_grpo", tree={"splits": (0, 2), "split_noise": factor}),
            num_generations=4,
        )
        for factor in (1.0, 3.0)
    )
    conditioning = embeddings.conditioning([0, 1])
    (first, *_), (same, *_) = (
        trainer.sampler(conditioning, 0).transitions for trainer in (plain, wide)
    )
    torch.testing.assert_close(
        same.next_latents - same.mean, 3 * (first.next_latents - first.mean), rtol=1e-4, atol=1e-5
    )
    assert (same.log_prob < first.log_prob).all()
    (_, second, *_), (_, as_usual, *_) = (
        trainer.sampler(conditioning, 0).transitions for trainer in (plain, wide)
    )
    spread = lambda sampled: ((sampled.next_latents - sampled.mean) ** 2).mean()
    torch.testing.assert_close(
        spread(as_usual), spread(second), rtol=1e-3, atol=1e-6
    )  # step 1 splits nothing


@pytest.mark.parametrize(
    "name, changes, group, problem",
    [
        ("branch_grpo", {}, 12, "12 members of a noise cannot come of 4 equal splits"),
        ("branch_grpo", {}, 16, None),
        (
            "flow_grpo",
            {"tree": {"initial_noises": 5}},
            12,
            "12 members cannot share 5 initial noises evenly",
        ),
        ("flow_grpo", {"tree": {"initial_noises": 12}}, 12, None),
        (
            "flow_grpo",
            {"tree": {"initial_noises": 12}, "credit": {"compared": "noise"}},
            12,
            "12 members cannot share 12 initial noises evenly",
        ),
        ("flow_grpo", {"tree": {"initial_noises": "each"}}, 7, None),
    ],
)
def test_a_group_that_the_method_cannot_sample_is_named(name, changes, group, problem):
    assert METHODS[name].changed(**changes).group_problem(group) == problem


SPLITTING = {"branching": "splits", "splits": (0, 1)}


@pytest.mark.parametrize(
    "changes, message",
    [
        (
            {"tree": {"spans": (2,), "branching": "each"}},
            "spans: needs a number for each of sde_steps",
        ),
        ({"tree": {"spans": (2, 1), "sde_steps": (0, 2)}}, "tree.all.spans\\n.*Extra inputs"),
        ({"tree": {"splits": (0,), "branching": "each"}}, "tree.each.splits\\n.*Extra inputs"),
        ({"tree": {"split_noise": 2.0}}, "tree.all.split_noise\\n.*Extra inputs"),
        (
            {"tree": SPLITTING | {"window": {"size": 1, "order": "frozen"}}},
            "tree.splits.window\\n.*Extra inputs",
        ),
        (
            {"tree": SPLITTING | {"splits": (3,), "sde_steps": (0, 2)}},
            "splits: must be some of sde_steps",
        ),
        (
            {"tree": SPLITTING | {"splits": (2, 0)}},
            "splits: must be some of sde_steps, in rising order",
        ),
        (
            {"tree": SPLITTING, "objective": {"updates_per_rollout": 2}},
            "updates_per_rollout: members share states",
        ),
        (
            {"tree": SPLITTING, "objective": {"timesteps_of": "member"}},
            "timesteps_of: members share states",
        ),
        (
            {"credit": {"reward": "gain"}, "tree": {"granularities": (1, 2)}},
            "gain has no tails to compare",
        ),
        (
            {"credit": {"reward": "gain", "node_advantages": "mean"}},
            "credit.gain.node_advantages\\n.*Extra inputs",
        ),
        (
            {"credit": {"compared": "noise"}, "tree": {"initial_noises": "each"}},
            "compared: noise needs several members",
        ),
        (
            {"objective": {"updates_per_rollout": "step", "timesteps_of": "member"}},
            "updates_per_rollout: step may have no member to train if timesteps_of is member",
        ),
        (
            {"tree": {"sde": "cps", "eta": 1.5}},
            "eta: 1.5 is more noise than there is: at most 1 with sde: cps",
        ),
    ],
)
def test_settings_that_do_not_fit_each_other_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        PLAIN.changed(**changes)


def test_a_part_that_becomes_of_another_kind_keeps_what_both_kinds_have():
    together = METHODS["e_grpo"].changed(tree={"branching": "all"}).tree
    assert together.branches(16) == (tuple(range(8)),) and set(together.spans_at(16).values()) == {
        1
    }
    assert (
        METHODS["stepwise_flow_grpo"]
        .changed(credit={"reward": "image", "deviation": "batch"})
        .credit.deviation
        == "batch"
    )
