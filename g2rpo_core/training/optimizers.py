"""Optimizers of torch and learning-rate schedules of transformers, by their names there."""

from collections.abc import Callable, Mapping, Sequence
from inspect import signature
from typing import Literal

import torch

# Those of transformers' SchedulerType whose rate is a function of the iteration alone: a resumed
# run then has no state of a schedule to restore
Schedule = Literal[
    "constant",
    "constant_with_warmup",
    "linear",
    "cosine",
    "cosine_with_restarts",
    "cosine_with_min_lr",
    "cosine_warmup_with_min_lr",
    "polynomial",
    "inverse_sqrt",
    "warmup_stable_decay",
]
# Whose rate does not depend on training.iterations
ENDLESS = ("constant", "constant_with_warmup", "inverse_sqrt")
ADAM_EPSILON = 1e-8  # torch's own for all optimizers of Adam's kind
Argument = bool | int | float | str | None | list[float]


def make_optimizer(
    name: str,
    parameters: Sequence[torch.nn.Parameter],
    learning_rate: float,
    weight_decay: float = 0.0,
    adam_epsilon: float = ADAM_EPSILON,
    arguments: Mapping[str, Argument] | None = None,
) -> torch.optim.Optimizer:
    """Return an optimizer of `torch.optim` with its own arguments; ValueError if it has not them.

    weight_decay is passed to those that take it, adam_epsilon as `eps` to those of Adam's kind.
    """
    kind = getattr(torch.optim, name, None)
    if not (isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)):
        raise ValueError(f"torch.optim has no optimizer {name}")  # noqa: TRY004 - a setting
    given: dict[str, object] = {}
    if "weight_decay" in signature(kind).parameters:
        given["weight_decay"] = weight_decay
    elif weight_decay:
        raise ValueError(f"{name} has no weight decay: set training.weight_decay to 0")
    if adam_epsilon != ADAM_EPSILON:
        if not is_adam(name):
            raise ValueError(f"{name} has no adam_epsilon: give its own eps in optimizer_args")
        given["eps"] = adam_epsilon
    # YAML has no tuples, such as those of betas
    own = {
        key: tuple(value) if isinstance(value, list) else value
        for key, value in (arguments or {}).items()
    }
    try:
        return kind(parameters, lr=learning_rate, **given, **own)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"torch.optim.{name} refuses them: {error}") from None


def is_adam(name: str) -> bool:
    """Tell whether an optimizer moves each weight by about the learning rate, whatever its size."""
    return "Adam" in name


def check_optimizer(name: str, **settings) -> None:
    """Try an optimizer on one matrix; ValueError if it cannot be made, or asks for a closure."""
    weight = torch.nn.Parameter(torch.zeros(2, 2))
    weight.grad = torch.zeros_like(weight)
    optimizer = make_optimizer(name, [weight], **settings)
    try:
        optimizer.step()
    except (TypeError, RuntimeError) as error:
        raise ValueError(f"{name} cannot train here: {error}") from None


def schedule(
    name: Schedule,
    learning_rate: float,
    iterations: int,
    warmup: int = 0,
    arguments: Mapping[str, Argument] | None = None,
) -> Callable[[int], float]:
    """Return the learning rate as a function of the iteration, from 0.

    warmup: iterations in which it rises from 0. ValueError for arguments that the schedule does not
    take, and for a warm-up where it has none.
    """
    # transformers would pass over them
    if arguments and name in ("constant", "constant_with_warmup"):
        raise ValueError(f"{name} takes no arguments")
    if name == "constant":
        if warmup:
            raise ValueError("constant has no warm-up: take constant_with_warmup")
        return lambda iteration: learning_rate
    if name == "linear" and not warmup and not arguments:
        # As transformers', without its import, which takes as long as torch's
        return lambda iteration: learning_rate * (1 - iteration / iterations)
    if warmup >= iterations:
        raise ValueError(f"a warm-up of {warmup} iterations leaves none of {iterations}")
    from transformers import get_scheduler

    weight = torch.nn.Parameter(torch.zeros(()))
    optimizer = torch.optim.SGD([weight], learning_rate)
    try:
        made = get_scheduler(name, optimizer, warmup, iterations, dict(arguments or {}))
        factor = made.lr_lambdas[0]
        for iteration in (0, warmup, iterations - 1):
            factor(iteration)
    except (TypeError, ValueError, ArithmeticError) as error:
        raise ValueError(f"{name} refuses its arguments: {error}") from None
    return lambda iteration: learning_rate * factor(iteration)
