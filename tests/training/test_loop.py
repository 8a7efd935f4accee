"""Numbers that stop a run: what is said, and that the checkpoint which is left comes to the same state again."""

import itertools
import json
from types import SimpleNamespace

import pytest
import torch

from g2rpo_core.distributed import checkpoint
from g2rpo_core.training.experience import NonFiniteError
from g2rpo_core.training.loop import CURVE, train
from g2rpo_core.training.settings import CheckpointSettings
from tests.fixtures.rollouts import redness, small_method


def test_a_number_that_stops_a_run_is_named_and_comes_again(make_trainer, policy, tmp_path):
    first = policy.transformer.proj_out.weight.clone()

    def broken(images, prompts):
        moved = not torch.equal(policy.transformer.proj_out.weight, first)
        return torch.full((len(images),), float("nan")) if moved else redness(images, prompts)

    messages = []
    for _ in range(2):
        trainer = make_trainer(small_method("g2rpo"), reward=broken)
        with pytest.raises(NonFiniteError, match="iteration 2: reward redness is nan for the prompt 'a ") as caught:
            train(trainer, tmp_path, dict, lambda record: None)
        messages.append(str(caught.value))
        assert [path.name for path in checkpoint.checkpoints(tmp_path)] == ["iteration-000001"]
        curve = [json.loads(line) for line in (tmp_path / CURVE).read_text().splitlines()]  # also of a run that was stopped
        assert [record["iteration"] for record in curve] == [0, 1] and curve[1]["reward_redness"] == pytest.approx(0, abs=1)
    assert messages[0] == messages[1] and str(tmp_path) in messages[0]


def test_an_old_policy_ratio_that_is_not_one_stops_before_the_update(make_trainer, policy):
    """Weights that move between rollout and update, here while scoring, make two policies of one."""
    weight, moved = policy.transformer.proj_out.weight, []

    def moving(images, prompts):
        with torch.no_grad():
            weight.mul_(1.01)
        moved.append(weight.clone())
        return redness(images, prompts)

    trainer = make_trainer(small_method("g2rpo"), reward=moving, max_old_policy_ratio_error=1e-4)
    message = r"iteration 1: \|ratio - 1\| is .* over 1e-08 \(training.max_old_policy_ratio_error clip ranges\)"
    with pytest.raises(NonFiniteError, match=message):
        list(trainer.run())
    # scored once a prompt, never updated
    assert len(moved) == trainer.training.prompts_per_iteration and torch.equal(moved[-1], weight)


def test_latents_that_are_no_numbers_stop_a_run(make_trainer, policy):
    with torch.no_grad():
        policy.transformer.proj_out.weight[0, 0] = float("nan")
    with pytest.raises(NonFiniteError, match="iteration 1: latents are not finite for the prompt 'a "):
        list(make_trainer(small_method("g2rpo")).run())


def test_checkpoints_are_written_every_so_many_iterations_and_after_the_last(make_trainer, tmp_path):
    settings = CheckpointSettings(every=2, keep=10)
    train(make_trainer(small_method("g2rpo"), iterations=5, checkpoints=settings), tmp_path, dict, lambda record: None)
    assert [path.name for path in checkpoint.checkpoints(tmp_path)] == [f"iteration-{number:06d}" for number in (2, 4, 5)]


def test_checkpoints_by_the_clock_are_written_after_so_many_minutes_and_at_the_end(make_trainer, tmp_path, monkeypatch):
    """Each look at the clock is 20 seconds later than the one before."""
    clock = itertools.count(0, 20)
    monkeypatch.setattr("g2rpo_core.training.loop.time", SimpleNamespace(monotonic=lambda: next(clock)))
    settings = CheckpointSettings(minutes=1, keep=10)
    train(make_trainer(small_method("g2rpo"), iterations=5, checkpoints=settings), tmp_path, dict, lambda record: None)
    assert [path.name for path in checkpoint.checkpoints(tmp_path)] == [f"iteration-{number:06d}" for number in (3, 5)]


def test_a_run_stopped_after_its_first_iteration_keeps_the_optimizers_moments(make_trainer, policy, tmp_path):
    """AdamW's second step depends on the first: without its moments the weights would end elsewhere."""
    start = {name: value.clone() for name, value in policy.transformer.state_dict().items()}
    first = policy.transformer.proj_out.weight.clone()
    (tmp_path / "whole").mkdir()
    shown: list[int] = []
    train(make_trainer(small_method("g2rpo")), tmp_path / "whole", dict, lambda record: shown.append(record["iteration"]))
    assert shown == [0, 1, 2]  # also where it begins
    whole = policy.transformer.proj_out.weight.clone()

    def broken(images, prompts):
        moved = not torch.equal(policy.transformer.proj_out.weight, first)
        return torch.full((len(images),), float("nan")) if moved else redness(images, prompts)

    policy.transformer.load_state_dict(start)
    (tmp_path / "stopped").mkdir()
    with pytest.raises(NonFiniteError):
        train(make_trainer(small_method("g2rpo"), reward=broken), tmp_path / "stopped", dict, lambda record: None)
    assert checkpoint.last_iteration(tmp_path / "stopped") == 1
    policy.transformer.load_state_dict(start)
    shown.clear()
    train(make_trainer(small_method("g2rpo")), tmp_path / "stopped", dict, lambda record: shown.append(record["iteration"]))
    assert shown == [1, 2]
    assert torch.equal(policy.transformer.proj_out.weight, whole)
