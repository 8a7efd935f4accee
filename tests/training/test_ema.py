"""The average of the weights: its closed form, where it is used, and the weights afterwards."""

from types import SimpleNamespace

import pytest
import torch
from diffusers import FluxTransformer2DModel

from g2rpo_core.models.policy import Policy, snapshot
from g2rpo_core.models.settings import LoraSettings
from g2rpo_core.training.average import Average
from g2rpo_core.training.loop import train
from g2rpo_core.training.settings import EmaSettings
from tests.fixtures.rollouts import small_method


def test_the_average_is_flow_grpos_sum(policy):
    """Steps 1, 3, 5, ... with decays min((1 + n) / (10 + n), 0.3)."""
    weight = policy.transformer.proj_out.weight
    ema = Average(policy, EmaSettings(decay=0.3, every=2))
    expected, generator = weight.detach().clone().double(), torch.Generator().manual_seed(0)
    for step in range(7):
        with torch.no_grad():
            weight.copy_(torch.randn(weight.shape, generator=generator))
        ema.update()
        if step in (1, 3, 5):
            decay = {1: 2 / 11, 3: 0.3, 5: 0.3}[
                step
            ]  # of step 3 the warm-up would be 4 / 13, more than 0.3
            expected = decay * expected + (1 - decay) * weight.detach().double()
    torch.testing.assert_close(ema.values["proj_out.weight"], expected.float())


def test_the_trainer_counts_its_optimizer_steps_from_zero(make_trainer, policy):
    trainer = make_trainer(
        small_method("g2rpo", objective={"updates_per_rollout": "iteration"}),
        learning_rate=1e-3,
        ema=EmaSettings(decay=0.9, every=1),
    )
    expected = policy.transformer.proj_out.weight.detach().clone()
    for step, _ in enumerate(trainer.run()):
        decay = (1 + step) / (10 + step)
        expected = decay * expected + (1 - decay) * policy.transformer.proj_out.weight.detach()
    assert step == 1
    torch.testing.assert_close(trainer.ema.values["proj_out.weight"], expected)


def test_the_average_takes_the_weights_place_and_gives_it_back(policy):
    weight = policy.transformer.proj_out.weight
    ema = Average(policy, EmaSettings(decay=0.5, every=1))
    start = weight.detach().clone()
    with torch.no_grad():
        weight.add_(1)
    moved = weight.detach().clone()
    with pytest.raises(KeyError), ema.in_place():
        assert torch.equal(weight, start)
        raise KeyError
    assert torch.equal(weight, moved) and torch.equal(ema.values["proj_out.weight"], start)


@pytest.mark.parametrize("lora", [None, LoraSettings(rank=2, alpha=4.0)])
def test_the_monitor_snapshots_and_the_result_are_the_averages(
    make_trainer, models, tmp_path, lora
):
    how = {"height": 32, "width": 32, "guidance": 3.5}
    policy = Policy.load_to_train(models / "pipeline", lora, **how)
    last = list(policy.trained_parameters())[-1]
    seen = lambda: {"heldout_weight": policy.trained_parameters()[last].sum().item()}
    ema = EmaSettings(decay=0.9, every=1)
    trainer = make_trainer(
        small_method("g2rpo"), policy=policy, learning_rate=1e-3, ema=ema, lora=lora, snapshots=(2,)
    )
    trainer.training = trainer.training.model_copy(
        update={"monitor": trainer.training.monitor.model_copy(update={"every": 1})}
    )
    records = train(trainer, tmp_path, seen, lambda record: None)

    average, weight = trainer.ema.values[last], policy.trained_parameters()[last].detach().clone()
    assert not torch.equal(average, weight)
    assert (
        records[-1]["heldout_weight"] == average.sum().item()
        and len({record["heldout_weight"] for record in records}) == 3
    )
    with trainer.result():
        policy.save(tmp_path / "run")
    assert torch.equal(policy.trained_parameters()[last], weight)
    for folder in (snapshot(tmp_path, 2), tmp_path / "run"):
        if lora:
            loaded = dict(
                Policy.load(models / "pipeline", folder, **how).transformer.named_parameters()
            )
            loaded = {
                name.replace(".default_0.", ".default."): value for name, value in loaded.items()
            }
        else:
            loaded = FluxTransformer2DModel.from_pretrained(folder / "transformer").state_dict()
        assert torch.equal(loaded[last], average)


def test_a_resumed_average_goes_on_counting_whatever_moments_count(make_trainer):
    """The steps of the optimizer's state are others, which are not restored here."""
    ema, method = (
        EmaSettings(decay=0.9, every=1),
        small_method("g2rpo", objective={"updates_per_rollout": 2}),
    )
    stopped, resumed = (make_trainer(method, learning_rate=1e-3, ema=ema) for _ in range(2))
    stopped.iterate(0)
    kept = stopped.state()
    resumed.restore(
        lambda into: [
            into[part][name].copy_(kept[part][name])
            for part in kept
            if part != "moments"
            for name in kept[part]
        ],
        True,
    )
    steps = []
    resumed.ema.schedule = SimpleNamespace(decay_at=lambda step: steps.append(step))
    resumed.iterate(1)
    assert steps == [2, 3]
