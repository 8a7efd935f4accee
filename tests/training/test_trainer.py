import itertools

import pytest
import torch

from g2rpo_core.algorithm.methods import METHODS
from g2rpo_core.distributed.launcher import Terminated
from g2rpo_core.models.generate import generate_images
from g2rpo_core.models.policy import Policy
from g2rpo_core.models.settings import LoraSettings
from g2rpo_core.reporting.statistics import paired_difference
from g2rpo_core.sampling.rollout import rollout
from g2rpo_core.sampling.schedule import even_sigmas, shifted_sigmas
from g2rpo_core.sampling.transitions import SDES
from g2rpo_core.training.experience import NonFiniteError
from g2rpo_core.training.settings import RunSettings
from g2rpo_core.training.trainer import Trainer
from tests.fixtures.rollouts import noise, redness, sigma_of, small_method, with_advantages

NOISED = [name for name, method in METHODS.items() if method.objective.trains == "noised"]


@pytest.mark.parametrize("name", [name for name in METHODS if name not in NOISED])
def test_ratio_is_one_before_the_first_update(make_trainer, name):
    records = list(make_trainer(small_method(name)).run())
    assert [record["iteration"] for record in records] == [1, 2]
    for record in records:
        assert record["old_policy_ratio_error"] < 2e-5  # a fifth of the clip range
        assert record["grad_norm"] > 0


@pytest.mark.parametrize("name", NOISED)
def test_a_method_of_noised_images_begins_at_the_policy_that_sampled(make_trainer, name):
    """It has no ratio; how far the policy moved from the old one is 0 at first."""
    records = list(make_trainer(small_method(name), learning_rate=1e-3).run())
    assert (
        len(records) == 2
        and "old_policy_ratio_error" not in records[0]
        and "clip_ratio" not in records[0]
    )
    assert all(record["grad_norm"] > 0 and record["velocity_error"] > 0 for record in records)
    assert records[0]["old_deviation"] < 1e-9
    slow = METHODS[name].objective.old
    assert (records[1]["old_deviation"] > 1e-9) == (slow is not None and slow.decay_at(0) > 0)


def test_the_first_update_alone_may_leave_ratio_one_when_stepping_per_sde_step(
    make_trainer, policy
):
    before = [p.clone() for p in policy.transformer.parameters()]
    trainer = make_trainer(
        small_method("g2rpo", objective={"updates_per_rollout": "step"}),
        iterations=1,
        learning_rate=1e-3,
    )
    (record,) = trainer.run()
    assert record["old_policy_ratio_error"] < 2e-5
    assert record["clip_ratio"] > 0  # the second and third update meet a policy that has moved
    assert any((p != q).any() for p, q in zip(before, policy.transformer.parameters()))


@pytest.mark.parametrize("name", METHODS)
def test_gradient_does_not_depend_on_the_batch_size(make_trainer, policy, name, monkeypatch):
    gradients = []
    monkeypatch.setattr(
        torch.optim.AdamW,
        "step",
        lambda self: gradients.append(
            [p.grad.clone() for p in policy.transformer.parameters() if p.grad is not None]
        ),
    )
    method = small_method(name, objective={"updates_per_rollout": 1})
    for latents in (2, 64):
        list(make_trainer(method, iterations=1, max_grad_norm=1e9, batch_tokens=latents * 32).run())
    small_batches, one_batch = gradients
    scale = max(g.abs().max() for g in one_batch)
    for a, b in zip(small_batches, one_batch):
        torch.testing.assert_close(a / scale, b / scale, rtol=1e-3, atol=1e-4)


def test_gradient_is_that_of_the_written_objective(make_trainer, policy, embeddings):
    """Eq. 9 with ratio 1: mean over prompts, SDE steps and members of -A grad log p."""
    method, sigmas = small_method("g2rpo"), shifted_sigmas(6, 3.0)
    tree = method.tree.build(6)
    initial, noises = noise(tree)
    conditioning = embeddings.conditioning([0, 1])
    velocity = policy.velocity(conditioning)
    transitions = rollout(
        velocity, tree, sigma_of(6), method.tree.transition(sigmas), initial, noises, 100
    ).transitions
    advantages = torch.randn(2, 3, 3, generator=torch.Generator().manual_seed(0))
    parameters = list(policy.transformer.parameters())
    terms = []
    for sampled, (prompt, member) in itertools.product(
        transitions, itertools.product(range(2), range(3))
    ):
        k = sampled.sde_step.step
        v = velocity(sampled.latents[prompt], sigmas[k : k + 1], torch.tensor([prompt]))
        transition = SDES["flow"](sampled.latents[prompt], v, sigmas, k, method.tree.eta)
        advantage = advantages[prompt, sampled.sde_step.branch, member]
        terms.append(-advantage * transition.log_prob(sampled.next_latents[prompt, member][None]))
    expected = torch.autograd.grad(torch.cat(terms).mean(), parameters, allow_unused=True)

    trainer = make_trainer(method, max_grad_norm=1e9)
    trainer.update(
        conditioning,
        trainer.objective.update([with_advantages(each, advantages) for each in transitions]),
    )
    for parameter, gradient in zip(parameters, expected):
        if gradient is not None:
            torch.testing.assert_close(parameter.grad, gradient, rtol=1e-3, atol=1e-6)


@pytest.mark.pipeline
@pytest.mark.parametrize("name", ["g2rpo", "dance_grpo"])
def test_training_raises_a_reward_on_noise_and_prompts_it_never_saw(
    make_trainer, policy, embeddings, settings, name
):
    sampling, _ = settings

    def heldout():
        parts = generate_images(
            policy, embeddings, len(embeddings), even_sigmas(sampling.steps, sampling.shift), 99, 24
        )
        return torch.cat([redness(images, None) for _, images in parts])[12:].numpy()

    before = heldout()
    method = small_method(
        name, objective={"updates_per_rollout": "iteration"}
    )  # several need smaller steps than so few iterations allow
    changes = {
        "iterations": 15,
        "learning_rate": 1e-3,
        "prompts_per_iteration": 1,
        "num_generations": 8,
    }
    list(make_trainer(method, prompts=FirstPrompts(embeddings, 12), **changes).run())
    rise = paired_difference(heldout(), before)
    assert rise["difference"] > 4 * rise["standard_error"]


class FirstPrompts:
    """The first prompts of a store."""

    def __init__(self, store, count):
        self.prompts, self.conditioning = store.prompts[:count], store.conditioning

    def __len__(self):
        return len(self.prompts)


def test_the_same_seed_gives_the_same_records_and_another_one_does_not(make_trainer, policy):
    start = {name: value.clone() for name, value in policy.transformer.state_dict().items()}
    runs = []
    for seed in (1, 1, 2):
        policy.transformer.load_state_dict(start)
        records = list(make_trainer(small_method("g2rpo"), seed=seed).run())
        runs.append(
            [
                {key: value for key, value in record.items() if key != "seconds"}
                for record in records
            ]
        )
    assert runs[0] == runs[1] != runs[2]


def test_a_reward_that_is_no_number_stops_the_run_before_an_update(make_trainer, policy):
    before = [p.clone() for p in policy.transformer.parameters()]

    def broken(images, prompts):
        return torch.where(torch.arange(len(images)) == 4, float("nan"), 1.0)

    with pytest.raises(
        NonFiniteError, match="iteration 1: reward redness is nan for the prompt 'a "
    ):
        list(make_trainer(small_method("g2rpo"), reward=broken).run())
    assert all(torch.equal(p, q) for p, q in zip(before, policy.transformer.parameters()))


def test_each_reward_keeps_its_own_scores(policy, embeddings, settings):
    sampling, training = settings
    training = training.model_copy(update={"rewards": {"redness": 1.0, "twice": 0.5}})
    rewards = {
        "redness": redness,
        "twice": lambda images, prompts: 2 * redness(images, prompts) + 1,
    }
    record = next(
        Trainer(
            RunSettings(small_method("g2rpo"), sampling, training), policy, embeddings, rewards, 0
        ).run()
    )
    assert record["reward_twice"] == pytest.approx(2 * record["reward_redness"] + 1, rel=1e-4)
    assert record["reward_std_twice"] == pytest.approx(2 * record["reward_std_redness"], rel=1e-3)


def test_kl_starts_at_zero_and_holds_the_policy_to_the_base(make_trainer, policy):
    start = {name: value.clone() for name, value in policy.transformer.state_dict().items()}
    drift = []
    for kl_coef in (1e-6, 100.0):
        policy.transformer.load_state_dict(start)
        records = list(
            make_trainer(
                small_method("flow_grpo", objective={"kl_coef": kl_coef, "updates_per_rollout": 1}),
                iterations=6,
                learning_rate=1e-3,
            ).run()
        )
        assert records[0]["kl"] == 0
        drift.append(records[-1]["kl"])
    assert drift[1] < drift[0] / 3


def test_the_normalized_ratio_starts_at_one_and_weighs_steps_by_noise_over_length(
    make_trainer, policy, embeddings
):
    """Its first gradient is the plain ratio's with each step times std / (sigma - sigma')."""
    gradients = {}
    for ratio in ("plain", "normalized"):
        trainer = make_trainer(small_method("g2rpo", objective={"ratio": ratio}), max_grad_norm=1e9)
        trainer.optimizer.step = lambda: None
        conditioning = embeddings.conditioning([0, 1])
        advantages = torch.randn(2, 3, 3, generator=torch.Generator().manual_seed(0))
        for sampled in trainer.sampler(conditioning, 0).transitions:
            record = trainer.update(
                conditioning, trainer.objective.update([with_advantages(sampled, advantages)])
            )
            assert record["old_policy_ratio_error"] < 2e-5
            step = sampled.sde_step.step
            sigma, following = trainer.sampler.sigmas[step : step + 2]
            std = trainer.sampler.transition(
                sampled.latents[0], sampled.latents[0], step=step
            ).std.item()
            gradients[ratio, step] = (
                policy.transformer.proj_out.weight.grad.clone(),
                std / (sigma - following).item(),
            )
    for (ratio, step), (gradient, weight) in gradients.items():
        if ratio == "plain":
            torch.testing.assert_close(
                gradients["normalized", step][0], gradient * weight, rtol=2e-3, atol=1e-5
            )


def test_recomputing_activations_changes_no_gradient(make_trainer, policy, embeddings):
    gradients = []
    for checkpointing in (False, True):
        trainer = make_trainer(small_method("g2rpo"), gradient_checkpointing=checkpointing)
        trainer.optimizer.step = lambda: None
        conditioning = embeddings.conditioning([0, 1])
        transitions = trainer.sampler(conditioning, 0).transitions
        trainer.update(
            conditioning,
            trainer.objective.update(
                [with_advantages(each, torch.ones(2, 3, 3)) for each in transitions]
            ),
        )
        gradients.append(
            torch.cat(
                [
                    parameter.grad.flatten()
                    for parameter in trainer.parameters
                    if parameter.grad is not None
                ]
            )
        )
        assert policy.transformer.is_gradient_checkpointing == checkpointing
    torch.testing.assert_close(*gradients)


def test_a_lora_learns_and_leaves_the_base_as_it_was(make_trainer, models):
    policy = Policy.load_to_train(
        models / "pipeline", LoraSettings(rank=4, alpha=8.0), height=32, width=32, guidance=3.5
    )
    with torch.no_grad():
        policy.transformer.proj_out.weight.copy_(
            0.1 * torch.randn(policy.transformer.proj_out.weight.shape)
        )
    before = {name: value.clone() for name, value in policy.transformer.state_dict().items()}
    method = small_method("flow_grpo", objective={"updates_per_rollout": 1})
    records = list(make_trainer(method, policy=policy, iterations=3, learning_rate=1e-3).run())
    assert records[0]["kl"] == 0 < records[-1]["kl"]
    changed = {
        name
        for name, value in policy.transformer.state_dict().items()
        if not torch.equal(value, before[name])
    }
    assert changed and all("lora_" in name for name in changed)


def test_an_experiment_may_hook_in_another_sampler(make_trainer, policy):
    """The trainer takes the groups that it is given, and counts them."""
    usual = make_trainer(small_method("g2rpo"))
    samplers = [
        make_trainer(small_method("g2rpo"), num_generations=size).sampler for size in (2, 4)
    ]
    usual.sampler = lambda conditioning, iteration, *words, **more: samplers[iteration](
        conditioning, iteration, *words, **more
    )
    records = list(usual.run())
    rollouts = [sampler(usual.prompts.conditioning([0, 1]), 0) for sampler in samplers]
    counts = [one.num_forward_evals for one in rollouts]
    assert usual.num_images == rollouts[-1].clean.shape[:4].numel()
    assert counts[0] < counts[1] and [record["num_forward_evals"] for record in records] == [
        counts[0],
        sum(counts),
    ]
    assert all(record["old_policy_ratio_error"] < 2e-5 for record in records)


def test_a_run_that_is_asked_to_stop_samples_no_further(make_trainer, policy):
    """It looks before every call of the transformer, and before it scores."""
    trainer = make_trainer(small_method("g2rpo"))
    calls = []

    def asked(*_):
        calls.append(True)
        trainer.termination.requested = len(calls) == 3

    hook = policy.transformer.register_forward_hook(asked)
    try:
        with pytest.raises(Terminated):
            list(trainer.run())
    finally:
        hook.remove()
    assert len(calls) == 3 and trainer.weights_unchanged
