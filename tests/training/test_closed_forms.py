"""Update, learning rate and limits in closed form: small faults would stay unseen."""

import pytest
import torch
from transformers import AutoTokenizer

from g2rpo_core.algorithm.advantage import branch_advantages
from g2rpo_core.data.embeddings import check_lengths
from g2rpo_core.data.prompts import Prompt
from g2rpo_core.distributed import checkpoint
from g2rpo_core.models.policy import snapshot
from g2rpo_core.tracking.display import topic
from g2rpo_core.training.loop import bytes_needed, train
from g2rpo_core.training.metrics import reward_metrics, update_metrics
from g2rpo_core.training.settings import EmaSettings
from tests.fixtures.errors import refused
from tests.fixtures.rollouts import redness, small_method, with_advantages


def test_the_optimizer_steps_with_the_learning_rate_of_the_iteration(make_trainer, monkeypatch):
    rates, norms = [], []
    monkeypatch.setattr(
        torch.optim.AdamW, "step", lambda self: rates.append(self.param_groups[0]["lr"])
    )
    plain = torch.nn.utils.clip_grad_norm_
    monkeypatch.setattr(
        torch.nn.utils,
        "clip_grad_norm_",
        lambda parameters, limit: norms.append(limit) or plain(parameters, limit),
    )
    trainer = make_trainer(
        small_method("g2rpo"),
        iterations=4,
        learning_rate=1e-2,
        lr_scheduler="linear",
        max_grad_norm=0.5,
    )
    list(trainer.run())
    assert rates == pytest.approx([1e-2, 7.5e-3, 5e-3, 2.5e-3]) and norms == [0.5] * 4
    assert {group["weight_decay"] for group in trainer.optimizer.param_groups} == {
        trainer.training.weight_decay
    }


def test_the_loss_is_the_mean_over_all_batches_of_an_update(make_trainer, policy, monkeypatch):
    """Each transition counts once, in however many batches."""
    monkeypatch.setattr(torch.optim.AdamW, "step", lambda self: None)
    records = []
    for latents in (1, 2, 64):
        trainer = make_trainer(
            small_method("g2rpo"), iterations=1, max_grad_norm=1e9, batch_tokens=latents * 32
        )
        (record,) = trainer.run()
        records.append(record)
    for key in ("loss", "grad_norm", "kl", "clip_ratio", "num_transitions"):
        assert [record[key] for record in records] == pytest.approx(
            [records[-1][key]] * 3, rel=1e-3, abs=1e-7
        ), key
    # with the ratio at 1 the loss is minus the mean advantage, which is 0 in every group
    assert (
        records[-1]["loss"] == pytest.approx(0, abs=1e-4)
        and records[-1]["num_transitions"] == 2 * 3
    )  # prompts x SDE steps


def test_the_loss_is_minus_the_mean_advantage_while_nothing_was_learned(
    make_trainer, embeddings, policy
):
    trainer = make_trainer(
        small_method("g2rpo"), batch_tokens=2 * 32
    )  # two states to a batch, six states
    conditioning = embeddings.conditioning([0, 1])
    sampled = trainer.sampler(conditioning, 0)
    advantages = torch.arange(18.0).view(2, 3, 3)
    transitions = [with_advantages(each, advantages) for each in sampled.transitions]
    measured = trainer.update(conditioning, trainer.objective.update(transitions))
    assert measured["loss"] == pytest.approx(-advantages.mean().item(), rel=1e-4)
    assert measured["num_transitions"] == 6 and measured["clip_ratio"] == 0


def test_advantages_of_a_branch_are_those_of_its_own_group(tiny):
    """Two groups with other means and spreads, weights 1 and 3, two granularities: by hand."""
    rewards = torch.tensor([[1.0, 3.0], [10.0, 30.0]]).view(1, 1, 2, 1, 2)  # R, P, B, J, G
    half = 2**-0.5  # (x - mean) / std of two numbers, ddof 1
    torch.testing.assert_close(
        branch_advantages(rewards, [1.0], 5.0), torch.tensor([[[-half, half]] * 2])
    )
    both = torch.cat([rewards, -rewards])
    torch.testing.assert_close(
        branch_advantages(both, [1.0, 3.0], 5.0), torch.tensor([[[2 * half, -2 * half]] * 2])
    )
    twice = rewards.expand(1, 1, 2, 2, 2)  # at both granularities
    torch.testing.assert_close(
        branch_advantages(twice, [1.0], 5.0), torch.tensor([[[-2 * half, 2 * half]] * 2])
    )
    torch.testing.assert_close(
        branch_advantages(twice, [1.0], 1.0), torch.tensor([[[-1.0, 1.0]] * 2])
    )  # clamped


def test_records_are_means_by_hand():
    rewards = torch.tensor([1.0, 3.0, 5.0, 9.0]).view(1, 1, 2, 1, 2)
    advantages = torch.tensor([[[-5.0, 5.0], [0.5, -0.5]]])
    measured = reward_metrics(["red"], rewards, advantages, (1,), 5.0)
    assert measured == pytest.approx(
        {
            "reward_red": 4.5,
            "reward_std_red": (2**0.5 + 4 / 2**0.5) / 2,
            "no_spread_red": 0,
            "adv_clip_share": 0.5,
        }
    )
    steps = [
        {
            "old_policy_ratio_error": ratio,
            "loss": n,
            "kl": 2 * n,
            "grad_norm": 3 * n,
            "clip_ratio": n / 10,
        }
        for n, ratio in ((1.0, 0.1), (3.0, 9.0))
    ]
    assert update_metrics(steps) == pytest.approx(
        {"old_policy_ratio_error": 0.1, "loss": 2, "kl": 4, "grad_norm": 6, "clip_ratio": 0.2}
    )


def test_groups_without_spread_are_counted_among_those_that_are_compared():
    """1 1 2 2 has a spread among all, and none within the halves; one last bit is none."""
    rewards = torch.tensor([[1.0, 1.0, 2.0, 2.0], [0.3, 0.3, 0.3, 0.30000004]]).view(1, 2, 1, 1, 4)
    share = lambda groups: reward_metrics(["red"], rewards, torch.zeros(1), (1,), 5.0, groups)[
        "no_spread_red"
    ]
    assert share(1) == 0.5 and share(2) == 1.0


def test_a_prompt_of_as_many_tokens_as_allowed_is_taken_and_one_more_is_not(models):
    tokenizer = AutoTokenizer.from_pretrained(models / "pipeline" / "tokenizer_2")
    prompt = Prompt("p-000000", "a red circle", "")
    length = len(tokenizer(prompt.text).input_ids)
    check_lengths([prompt], tokenizer, length)
    with refused(f"has {length} tokens .*max_.* = {length - 1}: .* or set {length}"):
        check_lengths([prompt], tokenizer, length - 1)


def test_as_many_latents_go_into_a_call_as_its_tokens_hold(policy, embeddings):
    conditioning = embeddings.conditioning([0])
    tokens = policy.image_tokens + conditioning.tensors["context"].shape[1]
    assert [
        policy.batch_size(count, conditioning) for count in (1, tokens, 2 * tokens - 1, 2 * tokens)
    ] == [1, 1, 1, 2]


def test_the_rewards_of_a_run_are_those_of_its_images(make_trainer):
    seen = []

    def watched(images, prompts):
        seen.append(redness(images, prompts))
        return seen[-1]

    (record,) = make_trainer(small_method("g2rpo"), reward=watched, iterations=1).run()
    again = seen.pop(1)  # the first prompt's first group, once more for the judge's noise
    assert torch.equal(again, seen[0][: len(again)])
    assert record["reward_redness"] == pytest.approx(torch.cat(seen).mean().item(), rel=1e-5)


def test_room_is_for_two_moments_the_average_and_one_checkpoint_more_than_are_kept(
    make_trainer, tmp_path
):
    for name, ema, tensors in (
        ("g2rpo", None, 3),
        ("g2rpo", EmaSettings(), 4),
        ("diffusion_nft", EmaSettings(), 5),
    ):
        trainer = make_trainer(small_method(name), ema=ema, snapshots=(1,))
        weights = 4 * sum(parameter.numel() for parameter in trainer.parameters)
        assert bytes_needed(trainer, tmp_path) == weights * (2 * tensors + 2 + 1)


def test_the_last_iteration_too_measures_held_out_prompts_and_writes_a_checkpoint(
    make_trainer, tmp_path
):
    measured = []

    def heldout() -> dict:
        measured.append(True)
        return {"heldout_redness": 0.5}

    trainer = make_trainer(
        small_method("g2rpo"),
        iterations=3,
        monitor=make_trainer(small_method("g2rpo")).training.monitor.model_copy(
            update={"every": 2}
        ),
    )
    records = train(trainer, tmp_path, heldout, lambda record: None)
    assert ["heldout_redness" in record for record in records] == [True, False, True, True] and len(
        measured
    ) == 3
    assert checkpoint.last_iteration(tmp_path) == 3


def test_a_snapshot_has_its_name_and_what_is_shown_of_a_group_is_a_whole_group(
    make_trainer, tmp_path
):
    shown = []
    trainer = make_trainer(small_method("g2rpo"), iterations=2, snapshots=(1,))
    trainer.watch = lambda iteration, prompt, images, scores: shown.append(
        (iteration, len(images), tuple(scores.shape))
    )
    train(trainer, tmp_path, dict, lambda record: None)
    assert (snapshot(tmp_path, 1) / "transformer" / "config.json").exists() and not snapshot(
        tmp_path, 2
    ).exists()
    assert shown == [(1, 3, (1, 3)), (2, 3, (1, 3))]
    assert [topic(name) for name in ("num_transitions", "seconds", "loss", "heldout_x")] == [
        "cost",
        "cost",
        "training",
        "held out",
    ]


def test_gradients_are_summed_over_processes_with_the_last_call_or_with_each(
    make_trainer, monkeypatch, settings
):
    told: list[bool] = []
    monkeypatch.setattr(
        "g2rpo_core.training.trainer.reduce_gradients", lambda transformer, now: told.append(now)
    )
    _, training = settings
    for reduce, expected in (("update", [False, False, True]), ("call", [True, True, True])):
        told.clear()
        parallel = training.parallel.model_copy(update={"reduce": reduce})
        list(
            make_trainer(
                small_method("g2rpo"), iterations=1, batch_tokens=2 * 32, parallel=parallel
            ).run()
        )  # 6 states, 2 a call
        assert told == expected
