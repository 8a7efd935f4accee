import itertools
import random

import pytest
import torch

from g2rpo_core.config import Adapter
from g2rpo_core.dynamics import SDES
from g2rpo_core.evaluation import pictures
from g2rpo_core.methods import METHODS
from g2rpo_core.policy import Policy
from g2rpo_core.rollout import rollout
from g2rpo_core.schedule import shifted_sigmas
from g2rpo_core.statistics import paired_difference
from g2rpo_core.trainer import NonFiniteError, Trainer, advantages_of, agreement, updates_of
from g2rpo_core.tree import build

from .test_rollout import level, noise

SAMPLING = {"steps": 6, "batch_tokens": 64 * 32}
TRAINING = {"iterations": 2, "prompts_per_iteration": 2, "group_size": 3, "batch_tokens": 64 * 32, "rewards": {"redness": 1.0}}


def redness(images, prompts):
    return images[:, 0].mean((1, 2)) - images[:, 1:].mean((1, 2, 3))


def training_run(*arguments, **settings):
    return Trainer(*arguments, **settings).run()


def small(name, **changes):
    noisy = "all" if METHODS[name].branching == "all" else (0, 1, 3)
    return METHODS[name].model_copy(update={"noisy_steps": noisy, **changes})


@pytest.fixture
def settings(tiny):
    return tiny.sampling.model_copy(update=SAMPLING), tiny.training.model_copy(update=TRAINING)


@pytest.mark.parametrize("name", METHODS)
def test_ratio_is_one_before_the_first_update(policy, embeddings, settings, name):
    records = list(training_run(policy, small(name), *settings, embeddings, {"redness": redness}, seed=0))
    assert [record["iteration"] for record in records] == [1, 2]
    for record in records:
        assert record["ratio_drift"] < 2e-5  # a fifth of the clip range
        assert record["grad_norm"] > 0


def test_the_first_update_alone_may_leave_ratio_one_when_stepping_per_noisy_step(policy, embeddings, settings):
    sampling, training = settings
    before = [p.clone() for p in policy.transformer.parameters()]
    training = training.model_copy(update={"iterations": 1, "learning_rate": 1e-3})
    (record,) = training_run(policy, small("g2rpo", updates="step"), sampling, training, embeddings, {"redness": redness}, seed=0)
    assert record["ratio_drift"] < 2e-5
    assert record["clip_share"] > 0  # the second and third update meet a policy that has moved
    assert any((p != q).any() for p, q in zip(before, policy.transformer.parameters()))


@pytest.mark.parametrize("name", METHODS)
def test_gradient_does_not_depend_on_the_batch_size(policy, embeddings, settings, name, monkeypatch):
    sampling, training = settings
    gradients = []
    monkeypatch.setattr(
        torch.optim.AdamW,
        "step",
        lambda self: gradients.append([p.grad.clone() for p in policy.transformer.parameters() if p.grad is not None]),
    )
    training = training.model_copy(update={"iterations": 1, "max_grad_norm": 1e9})
    for latents in (2, 64):
        list(
            training_run(
                policy,
                small(name, updates="iteration"),
                sampling,
                training.model_copy(update={"batch_tokens": latents * 32}),
                embeddings,
                {"redness": redness},
                seed=0,
            )
        )
    small_batches, one_batch = gradients
    scale = max(g.abs().max() for g in one_batch)
    for a, b in zip(small_batches, one_batch):
        torch.testing.assert_close(a / scale, b / scale, rtol=1e-3, atol=1e-4)


def test_gradient_is_that_of_the_written_objective(policy, embeddings, settings):
    """Eq. 9 with the ratio at one, term by term: mean over prompts, noisy steps and members of -A grad log p."""
    method, sigmas = small("g2rpo"), shifted_sigmas(6, 3.0)
    tree = build(method.branches(6), method.granularities, 6)
    initial, noises = noise(tree)
    conditioning = embeddings.conditioning([0, 1])
    velocity = policy.velocity(conditioning)
    sampled = rollout(velocity, tree, level(6), method.transition(sigmas), initial, noises, 100)
    advantages = torch.randn(2, 3, 3, generator=torch.Generator().manual_seed(0))
    parameters = list(policy.transformer.parameters())
    terms = []
    for taken, (prompt, member) in itertools.product(sampled.taken, itertools.product(range(2), range(3))):
        k = taken.decision.step
        v = velocity(taken.latents[prompt], sigmas[k : k + 1], torch.tensor([prompt]))
        transition = SDES["flow"](taken.latents[prompt], v, sigmas, k, method.eta)
        terms.append(
            -advantages[prompt, taken.decision.branch, member] * transition.log_prob(taken.next_latents[prompt, member][None])
        )
    expected = torch.autograd.grad(torch.cat(terms).mean(), parameters, allow_unused=True)

    sampling, training = settings
    trainer = Trainer(policy, method, sampling, training.model_copy(update={"max_grad_norm": 1e9}), embeddings, {}, seed=0)
    trainer.update(conditioning, sampled.taken, advantages)
    for parameter, gradient in zip(parameters, expected):
        if gradient is not None:
            torch.testing.assert_close(parameter.grad, gradient, rtol=1e-3, atol=1e-6)


def test_advantages_stay_with_their_prompt_and_branch():
    scores = torch.randn(2, 3, 4, 2, 5, generator=torch.Generator().manual_seed(0))  # [R, P, B, J, G]
    ours = advantages_of(scores, [1.0, 0.5], clip=100)
    for prompt, branch in itertools.product(range(3), range(4)):
        group = scores[:, prompt, branch]  # [R, J, G]
        standardized = (group - group.mean(-1, keepdim=True)) / group.std(-1, keepdim=True)
        expected = standardized[0].sum(0) + 0.5 * standardized[1].sum(0)
        torch.testing.assert_close(ours[prompt, branch], expected, rtol=1e-4, atol=1e-4)


def test_agreement_is_that_of_each_group_with_its_finest_granularity():
    rng = torch.Generator().manual_seed(0)
    finest = torch.randn(2, 3, 4, 1, 12, generator=rng)
    noise = torch.randn(2, 3, 4, 1, 12, generator=rng)
    found = agreement(torch.cat([finest, 2 * finest + 5, -finest, finest + noise], 3), ["a", "b_c"], (1, 2, 3, 6))
    assert found["correlation_a_2"] == pytest.approx(1) and found["correlation_b_c_3"] == pytest.approx(-1)
    assert found["gap_a_2"] == pytest.approx(5 + finest[0].mean().item(), abs=1e-5)
    expected = torch.stack(
        [torch.corrcoef(torch.stack(pair))[0, 1] for pair in zip(finest[1].view(-1, 12), (finest + noise)[1].view(-1, 12))]
    )
    assert found["correlation_b_c_6"] == pytest.approx(expected.mean().item(), abs=1e-5)
    assert agreement(finest, ["a", "b_c"], (3,)) == {}


@pytest.mark.parametrize("name", ["g2rpo", "dance_grpo"])
def test_training_raises_a_reward_on_noise_and_prompts_it_never_saw(policy, embeddings, settings, name):
    sampling, training = settings

    def heldout():
        parts = pictures(policy, embeddings, len(embeddings), sampling.steps, sampling.shift, 99, 24)
        return torch.cat([redness(images, None) for _, images in parts])[12:].numpy()

    seen = Subset(embeddings, 12)
    before = heldout()
    training = training.model_copy(update={"iterations": 30, "learning_rate": 1e-3, "prompts_per_iteration": 1, "group_size": 8})
    one = small(name, updates="iteration")  # several need smaller steps than so few iterations allow
    list(training_run(policy, one, sampling, training, seen, {"redness": redness}, seed=0))
    assert paired_difference(heldout(), before).standard_errors > 4


class Subset:
    """The first prompts of a store."""

    def __init__(self, store, count):
        self.prompts, self.conditioning = store.prompts[:count], store.conditioning

    def __len__(self):
        return len(self.prompts)


def test_the_same_seed_gives_the_same_records_and_another_one_does_not(policy, embeddings, settings):
    start = {name: value.clone() for name, value in policy.transformer.state_dict().items()}
    runs = []
    for seed in (1, 1, 2):
        policy.transformer.load_state_dict(start)
        records = list(training_run(policy, small("g2rpo"), *settings, embeddings, {"redness": redness}, seed=seed))
        runs.append([{key: value for key, value in record.items() if key != "seconds"} for record in records])
    assert runs[0] == runs[1] != runs[2]


def test_a_reward_that_is_no_number_stops_the_run_before_an_update(policy, embeddings, settings):
    before = [p.clone() for p in policy.transformer.parameters()]

    def broken(images, prompts):
        return torch.where(torch.arange(len(images)) == 4, float("nan"), 1.0)

    with pytest.raises(NonFiniteError, match="iteration 1: reward redness is nan for the prompt 'a "):
        list(training_run(policy, small("g2rpo"), *settings, embeddings, {"redness": broken}, seed=0))
    assert all(torch.equal(p, q) for p, q in zip(before, policy.transformer.parameters()))


def test_a_share_of_the_noisy_steps_is_drawn():
    method = METHODS["dance_grpo"]
    draws = [method.trained(15, random.Random(seed)) for seed in range(50)]
    assert all(len(draw) == len(set(draw)) == 9 for draw in draws)
    assert {index for draw in draws for index in draw} == set(range(15))


def test_updates_on_parts_of_the_group_cover_every_transition_once(policy, embeddings, settings):
    trainer = Trainer(policy, small("mix_grpo"), *settings, embeddings, {}, seed=0)
    taken = trainer.sample(embeddings.conditioning([0, 1]), 0).taken
    advantages = torch.randn(2, 1, 3)
    for updates, sizes in ((2, [2, 1]), (3, [1, 1, 1]), (7, [1, 1, 1]), ("iteration", [3])):
        parts = updates_of(taken, advantages, updates)
        assert [part.shape[-1] for _, part in parts] == sizes
        assert torch.equal(torch.cat([part for _, part in parts], -1), advantages)
        for place, one in enumerate(taken):
            assert torch.equal(torch.cat([part[place].next_latents for part, _ in parts], 1), one.next_latents)
            assert torch.equal(torch.cat([part[place].log_prob for part, _ in parts], 1), one.log_prob)


def test_kl_starts_at_zero_and_holds_the_policy_to_the_base(policy, embeddings, settings):
    sampling, training = settings
    start = {name: value.clone() for name, value in policy.transformer.state_dict().items()}
    training = training.model_copy(update={"iterations": 12, "learning_rate": 1e-3})
    drift = []
    for weight in (1e-6, 100.0):
        policy.transformer.load_state_dict(start)
        records = list(
            training_run(policy, small("flow_grpo", kl=weight), sampling, training, embeddings, {"redness": redness}, seed=0)
        )
        assert records[0]["kl"] == 0
        drift.append(records[-1]["kl"])
    assert drift[1] < drift[0] / 3


def test_the_normalized_ratio_starts_at_one_and_weighs_steps_by_noise_over_length(policy, embeddings, settings):
    """At the first update its gradient is that of the plain ratio with each step's loss times std / (sigma - sigma')."""
    sampling, training = settings
    training = training.model_copy(update={"max_grad_norm": 1e9})
    gradients = {}
    for name in ("plain", "normalized"):
        trainer = Trainer(policy, small("g2rpo", ratio=name), sampling, training, embeddings, {}, seed=0)
        trainer.optimizer.step = lambda: None
        conditioning = embeddings.conditioning([0, 1])
        taken = trainer.sample(conditioning, 0).taken
        advantages = torch.randn(2, 3, 3, generator=torch.Generator().manual_seed(0))
        for one in taken:
            record = trainer.update(conditioning, [one], advantages)
            assert record["ratio_drift"] < 2e-5
            sigma, following = trainer.sigmas[one.decision.step : one.decision.step + 2]
            std = trainer.transition(one.latents[0], one.latents[0], step=one.decision.step).std.item()
            gradients[name, one.decision.step] = policy.transformer.proj_out.weight.grad.clone(), std / (sigma - following).item()
    for (name, step), (gradient, weight) in gradients.items():
        if name == "plain":
            torch.testing.assert_close(gradients["normalized", step][0], gradient * weight, rtol=2e-3, atol=1e-5)


def test_recomputing_activations_changes_no_gradient(policy, embeddings, settings):
    sampling, training = settings
    gradients = []
    for checkpointing in (False, True):
        one = training.model_copy(update={"checkpointing": checkpointing})
        trainer = Trainer(policy, small("g2rpo"), sampling, one, embeddings, {}, seed=0)
        trainer.optimizer.step = lambda: None
        conditioning = embeddings.conditioning([0, 1])
        trainer.update(conditioning, trainer.sample(conditioning, 0).taken, torch.ones(2, 3, 3))
        gradients.append(torch.cat([parameter.grad.flatten() for parameter in trainer.parameters if parameter.grad is not None]))
        assert policy.transformer.is_gradient_checkpointing == checkpointing
    torch.testing.assert_close(*gradients)


def test_an_adapter_learns_and_leaves_the_base_as_it_was(models, embeddings, settings):
    sampling, training = settings
    policy = Policy.load(models / "pipeline", adapter=Adapter(rank=4, alpha=8.0), height=32, width=32, guidance=3.5)
    with torch.no_grad():
        policy.transformer.proj_out.weight.copy_(0.1 * torch.randn(policy.transformer.proj_out.weight.shape))
    before = {name: value.clone() for name, value in policy.transformer.state_dict().items()}
    training = training.model_copy(update={"iterations": 3, "learning_rate": 1e-3})
    records = list(training_run(policy, small("flow_grpo"), sampling, training, embeddings, {"redness": redness}, seed=0))
    assert records[0]["kl"] == 0 < records[-1]["kl"]
    changed = {name for name, value in policy.transformer.state_dict().items() if not torch.equal(value, before[name])}
    assert changed and all("lora_" in name for name in changed)
