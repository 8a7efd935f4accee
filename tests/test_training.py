"""Numbers that stop a run: what is said, and that the checkpoint which is left comes to the same place again."""

import pytest
import torch

from g2rpo_core import checkpoint
from g2rpo_core.trainer import NonFiniteError, Trainer
from g2rpo_core.training import train

from .test_trainer import redness, settings, small  # noqa: F401 - a fixture


def test_a_number_that_stops_a_run_is_named_and_comes_again(policy, embeddings, settings, tmp_path):  # noqa: F811
    first = policy.transformer.proj_out.weight.clone()

    def broken(images, prompts):
        moved = not torch.equal(policy.transformer.proj_out.weight, first)
        return torch.full((len(images),), float("nan")) if moved else redness(images, prompts)

    messages = []
    for _ in range(2):
        trainer = Trainer(policy, small("g2rpo"), *settings, embeddings, {"redness": broken}, seed=0)
        with pytest.raises(NonFiniteError, match="iteration 2: reward redness is nan for the prompt 'a ") as caught:
            train(trainer, tmp_path, dict, lambda record: None)
        messages.append(str(caught.value))
        assert [path.name for path in checkpoint.checkpoints(tmp_path)] == ["iteration-000001"]
    assert messages[0] == messages[1] and str(tmp_path) in messages[0]


def test_a_ratio_that_drifts_stops_before_the_update(policy, embeddings, settings):  # noqa: F811
    """Weights that move between rollout and update, here while scoring, make two policies of one."""
    sampling, training = settings
    weight, moved = policy.transformer.proj_out.weight, []

    def moving(images, prompts):
        with torch.no_grad():
            weight.mul_(1.01)
        moved.append(weight.clone())
        return redness(images, prompts)

    training = training.model_copy(update={"max_ratio_drift": 1e-6})
    with pytest.raises(NonFiniteError, match=r"iteration 1: \|ratio - 1\| is .* over training.max_ratio_drift = 1e-06"):
        list(Trainer(policy, small("g2rpo"), sampling, training, embeddings, {"redness": moving}, seed=0).run())
    assert len(moved) == training.prompts_per_iteration and torch.equal(moved[-1], weight)  # scored once a prompt, never updated


def test_latents_that_are_no_numbers_stop_a_run(policy, embeddings, settings):  # noqa: F811
    with torch.no_grad():
        policy.transformer.proj_out.weight[0, 0] = float("nan")
    with pytest.raises(NonFiniteError, match="iteration 1: latents are not finite for the prompt 'a "):
        list(Trainer(policy, small("g2rpo"), *settings, embeddings, {"redness": redness}, seed=0).run())
