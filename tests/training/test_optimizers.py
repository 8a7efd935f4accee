"""Optimizers of torch and schedules of transformers by name, as they are there."""

import pytest
import torch
from pydantic import ValidationError
from transformers import get_scheduler

from g2rpo_core.training.optimizers import make_optimizer
from g2rpo_core.training.settings import TrainingSettings
from tests.fixtures.rollouts import small_method

OPTIMIZERS = {
    "SGD": {"momentum": 0.9},
    "Adafactor": {},
    "NAdam": {"betas": [0.8, 0.9]},
    "Adagrad": {},
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_run_goes_on_with_any_optimizers_state(make_trainer, policy, name):
    """As if it had not been stopped between its two iterations."""
    how = {"optimizer": name, "optimizer_args": OPTIMIZERS[name], "learning_rate": 1e-3}
    start = {key: value.clone() for key, value in policy.transformer.state_dict().items()}
    ends = []
    for stop in (False, True):
        policy.transformer.load_state_dict(start)
        trainer = make_trainer(small_method("g2rpo"), **how)
        run = trainer.run()
        record = next(run)
        if stop:
            kept = {
                part: {
                    key: value.clone() if torch.is_tensor(value) else dict(value)
                    for key, value in of_part.items()
                }
                for part, of_part in trainer.state().items()
            }
            policy.transformer.load_state_dict(start)
            trainer = make_trainer(small_method("g2rpo"), **how)
            trainer.restore(lambda state, kept=kept: fill(state, kept), updated=True)
            run = trainer.run({"iteration": 1, **{key: record.get(key, 0.0) for key in TOTALS}})
        next(run)
        ends.append(policy.transformer.proj_out.weight.clone())
    assert torch.equal(*ends) and not torch.equal(ends[0], start["proj_out.weight"])


TOTALS = ("num_forward_evals", "num_transitions", "seconds")


def fill(state: dict, kept: dict) -> None:
    assert state.keys() == kept.keys()
    for name, value in state.items():
        if torch.is_tensor(value):
            value.copy_(kept[name])
        else:
            fill(value, kept[name])


@pytest.mark.parametrize(
    "name, arguments",
    [("linear", {}), ("cosine", {"num_cycles": 1.5}), ("cosine_with_min_lr", {"min_lr": 1e-4})],
)
def test_a_schedule_is_that_of_transformers(tiny, name, arguments):
    changes = {"lr_scheduler": name, "lr_warmup_steps": 3, "lr_scheduler_kwargs": arguments}
    training = valid(tiny, changes | {"iterations": 9, "learning_rate": 1e-3})
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], 1e-3)
    theirs, rates = get_scheduler(name, optimizer, 3, 9, arguments), []
    for _ in range(9):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        theirs.step()
    assert [*map(training.rate_schedule(), range(9))] == pytest.approx(rates) and rates[0] == 0
    assert training.end is None


def valid(tiny, changes: dict) -> TrainingSettings:
    return TrainingSettings.model_validate(tiny.training.model_dump() | changes)


@pytest.mark.parametrize(
    "changes, problem",
    [
        ({"optimizer": "Lion"}, "torch.optim has no optimizer Lion"),
        ({"optimizer": "LBFGS", "weight_decay": 0.0}, "LBFGS cannot train here"),
        ({"optimizer": "Rprop"}, "Rprop has no weight decay"),
        ({"optimizer": "SGD", "adam_epsilon": 1e-15}, "SGD has no adam_epsilon"),
        ({"optimizer_args": {"betas": [0.9, 2.0]}}, "Invalid beta parameter"),
        ({"optimizer_args": {"lr": 1.0}}, "lr"),
        ({"lr_warmup_steps": 5}, "take constant_with_warmup"),
        ({"lr_scheduler": "cosine", "lr_scheduler_kwargs": {"cycles": 2}}, "cosine refuses"),
        ({"lr_scheduler": "cosine", "lr_warmup_steps": 10**6}, "leaves none"),
        ({"lr_scheduler": "reduce_lr_on_plateau"}, "Input should be"),
    ],
)
def test_an_optimizer_or_schedule_that_cannot_be_had_is_refused(tiny, changes, problem):
    with pytest.raises(ValidationError, match=problem):
        valid(tiny, {"lr_scheduler": "constant"} | changes)


def test_adam_epsilon_is_the_optimizers(tiny):
    weight = torch.nn.Parameter(torch.zeros(1))
    settings = valid(tiny, {"adam_epsilon": 1e-15}).optimizer_settings
    made = make_optimizer("AdamW", [weight], **settings)
    assert made.defaults["eps"] == 1e-15 and made.defaults["weight_decay"] == 1e-4
