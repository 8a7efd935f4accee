"""Numbers that drift: when they are told, and that they stop a run that asks for it."""

from functools import partial

import pytest
import torch

from g2rpo_core.algorithm.methods import METHODS
from g2rpo_core.distributed import checkpoint
from g2rpo_core.training import drift
from g2rpo_core.training.drift import DriftError
from g2rpo_core.training.loop import train
from g2rpo_core.training.settings import DriftSettings, TrainingSettings
from tests.fixtures.rollouts import redness, small_method

# of methods with one update an iteration, where a test says nothing else
history, find_warnings = partial(drift.history, updates=1), partial(drift.find_warnings, updates=1)


@pytest.fixture
def training(tiny) -> TrainingSettings:
    changes = {"rewards": {"hps": 1.0}, "drift": DriftSettings(patience=3, measurements=2)}
    return tiny.training.model_copy(update=changes)


def records(
    count: int,
    heldout=lambda n: 0.5,
    other=lambda n: 0.5,
    reward=lambda n: 0.5,
    std=lambda n: 1.0,
    clip=lambda n: 0.0,
    flat=lambda n: 0.0,
) -> list[dict]:
    """Row 0 and `count` iterations, with held-out rewards in every second."""
    rows = []
    for n in range(count + 1):
        row = {"iteration": n}
        if n:
            row |= {
                "reward_hps": reward(n),
                "reward_std_hps": std(n),
                "clip_ratio": clip(n),
                "no_spread_hps": flat(n),
            }
        if n % 2 == 0:
            row |= {"heldout_hps": heldout(n), "heldout_verifier": other(n)}
        rows.append(row)
    return rows


def test_a_healthy_run_is_told_nothing(training):
    assert not history(
        records(20, heldout=lambda n: n, other=lambda n: n, reward=lambda n: n), training
    )


def test_a_held_out_reward_that_falls_while_the_trained_one_rises(training):
    falling = records(8, heldout=lambda n: -n, reward=lambda n: n)
    ((iteration, text),) = history(falling, training)
    assert iteration == 4 and "heldout_hps fell 2 times in a row while it rose in training" in text
    assert not history(
        records(8, heldout=lambda n: -n, reward=lambda n: -n), training
    )  # it falls in training as well
    assert find_warnings(falling[:8], training) == find_warnings(
        falling[:7], training
    )  # it stands until the next measurement


def test_an_interval_holds_the_iterations_after_a_measurement_up_to_the_next(training):
    """5, 1 | 4, 3 | 2, 6: means 3, 3.5 and 4 rise; shifted by one they would not."""
    rewards = {1: 5, 2: 1, 3: 4, 4: 3, 5: 2, 6: 6}
    told = history(
        records(6, heldout=lambda n: -n, reward=rewards.get),
        training.model_copy(update={"drift": DriftSettings(measurements=3)}),
    )
    assert [iteration for iteration, _ in told] == [6]
    uneven = {1: 1, 2: 1, 3: 5, 4: 5, 5: 4, 6: 4}  # means 1, 5 and 4
    assert not history(
        records(6, heldout=lambda n: -n, reward=uneven.get),
        training.model_copy(update={"drift": DriftSettings(measurements=3)}),
    )
    penalty = training.model_copy(update={"rewards": {"hps": -1.0}})  # which is to fall
    rows = records(8, heldout=lambda n: -n, other=lambda n: n, reward=lambda n: n)
    ((iteration, text),) = history(rows, penalty)
    assert iteration == 0 and text.startswith("no reward has a positive weight")


def test_a_reward_that_was_not_trained_on_and_falls_while_the_trained_one_rises(training):
    ((iteration, text),) = history(
        records(8, heldout=lambda n: n, other=lambda n: -n, reward=lambda n: n), training
    )
    assert (
        iteration == 4
        and "heldout_verifier fell 2 times in a row while the held-out training reward rose" in text
    )


def test_a_spread_that_collapses(training):
    told = history(records(12, std=lambda n: 1.0 if n < 7 else 0.01), training)
    assert [iteration for iteration, _ in told] == [
        9
    ] and "reward_std_hps fell from 1 to 0.01" in told[0][1]
    assert not history(records(12, std=lambda n: 1.0 if n < 7 else 0.06), training)


def test_a_reward_that_never_tells_a_group_apart_is_named_with_what_to_do(training):
    told = history(records(12, std=lambda n: 0.0, flat=lambda n: 1.0), training)
    assert [iteration for iteration, _ in told] == [
        3
    ]  # once, after as many iterations as `patience` says
    assert (
        "reward hps gave all images of a group the same score" in told[0][1]
        and "nothing is learned" in told[0][1]
    )
    assert not history(records(12, flat=lambda n: 0.99), training)
    assert not history(
        records(12, flat=lambda n: float(n % 3 > 0)), training
    )  # never three in a row
    late = history(records(12, std=lambda n: float(n < 7), flat=lambda n: float(n >= 7)), training)
    assert (
        [iteration for iteration, _ in late] == [9]
        and "no_spread" not in late[0][1]
        and "same score" in late[0][1]
    )


def test_a_run_shorter_than_the_patience_is_told_at_its_end(training):
    short = training.model_copy(update={"iterations": 2})
    assert [iteration for iteration, _ in history(records(2, flat=lambda n: 1.0), short)] == [2]


def test_a_constant_reward_warns_while_the_run_goes_on_and_changes_no_weight(
    make_trainer, tmp_path
):
    constant = lambda images, prompts: torch.full((len(prompts),), 0.3)
    trainer = make_trainer(
        small_method("g2rpo"),
        reward=constant,
        iterations=3,
        drift=DriftSettings(patience=2),
        weight_decay=0.0,
    )
    before = {
        name: value.detach().clone() for name, value in trainer.policy.trained_parameters().items()
    }
    warned: list[tuple[int, str]] = []
    rows = train(trainer, tmp_path, dict, lambda record: None, lambda *told: warned.append(told))
    assert [iteration for iteration, _ in warned] == [2] and "reward redness" in warned[0][1]
    assert all(row["no_spread_redness"] == 1.0 for row in rows[1:])
    assert all(
        torch.equal(value, before[name])
        for name, value in trainer.policy.trained_parameters().items()
    )


def test_updates_that_are_clipped_for_long(training):
    rows = records(12, clip=lambda n: 0.61 if n in (2, 3, 5, 6, 7, 8, 10) else 0.59)
    told = history(rows, training, updates=3)
    assert [iteration for iteration, _ in told] == [
        7
    ] and "clip_ratio was 0.6 or more (of at most 0.67) in 3 iterations" in told[0][1]  # once
    assert not history(rows, training, updates=1)  # whose only update nothing is clipped in


def test_the_updates_of_a_method():
    assert [METHODS[name].num_updates(10) for name in ("g2rpo", "mix_grpo", "dance_grpo")] == [
        1,
        4,
        3,
    ]
    assert (
        METHODS["dance_grpo"].changed(objective={"updates_per_rollout": "step"}).num_updates(11)
        == 6
    )  # 60 % of 10


def test_a_run_that_asks_for_it_is_stopped_with_a_checkpoint_and_goes_on_without(
    make_trainer, tmp_path
):
    drift = DriftSettings(patience=2, stop=True)
    make = lambda drift: make_trainer(
        small_method("g2rpo", objective={"updates_per_rollout": 3}),
        iterations=4,
        learning_rate=1e-2,
        clip_range=1e-9,
        drift=drift,
        max_old_policy_ratio_error=1e9,
    )
    warned: list[int] = []
    warn = lambda iteration, text: (
        warned.append(iteration) if text.startswith("clip_ratio") else None
    )
    with pytest.raises(
        DriftError,
        match=(
            "iteration 2: clip_ratio was 0.6 or more .of at most 0.67. "
            "in 2 iterations.*training.drift.stop: false"
        ),
    ):
        train(make(drift), tmp_path, dict, lambda record: None, warn)
    assert warned == [2] and checkpoint.last_iteration(tmp_path) == 2
    records = train(make(DriftSettings(patience=2)), tmp_path, dict, lambda record: None, warn)
    assert [record["iteration"] for record in records] == [0, 1, 2, 3, 4] and warned == [2, 2]


def test_a_ratio_that_is_off_warns_and_stops_no_run(make_trainer, policy, tmp_path):
    """Weights move while scoring, in a run that stops at a warning."""
    weight, warned = policy.transformer.proj_out.weight, []

    def moving(images, prompts):
        with torch.no_grad():
            weight.mul_(1.01)
        return redness(images, prompts)

    trainer = make_trainer(small_method("g2rpo"), reward=moving, drift=DriftSettings(stop=True))
    records = train(
        trainer,
        tmp_path,
        dict,
        lambda record: None,
        lambda iteration, text: warned.append((iteration, text)),
    )
    assert [record["iteration"] for record in records] == [0, 1, 2]
    ((iteration, text),) = warned
    assert iteration == 1 and "|ratio - 1| was " in text and "over clip_range 0.0001" in text
