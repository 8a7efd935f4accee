"""Averages of the trained weights: the EMA that is evaluated, or the slow policy that samples."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import torch
from torch.distributed.tensor import DTensor
from torch.optim.swa_utils import get_ema_multi_avg_fn

from g2rpo_core.models.loading import reshard
from g2rpo_core.models.policy import Policy


class Schedule(Protocol):
    """How fast an average follows the weights."""

    def decay_at(self, step: int) -> float | None:
        """Return the old average's weight after a step, from 0; None: the average stays."""
        ...


class Average:
    """An average of the policy's trained parameters: float32, sharded over processes as they are.

    `values`: name -> average, at first the weights themselves; `num_updates`: how often `update`
    was called, int64.
    """

    def __init__(self, policy: Policy, schedule: Schedule):
        self.policy, self.schedule = policy, schedule
        # Clones of gathered weights would be copies in the dtype of the computation
        reshard(policy.transformer)
        self.values = {
            name: parameter.detach().clone()
            for name, parameter in policy.trained_parameters().items()
        }
        # A tensor, not an int: a checkpoint restores it in place
        self.num_updates = torch.tensor(0)

    def state(self) -> dict[str, torch.Tensor]:
        """Return all that a resumed run restores, in place."""
        return {**self.values, "num_updates": self.num_updates}

    def update(self) -> None:
        """Add the weights after the next step, if the schedule says so."""
        decay = self.schedule.decay_at(int(self.num_updates))
        self.num_updates += 1
        if decay is not None:
            averages, weights = self._parts()
            get_ema_multi_avg_fn(decay)(averages, weights, None)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Within the block, the policy and the rollouts' replica have the average.

        Afterwards they have their own weights again, bit for bit. Collective.
        """
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    def _exchange(self) -> None:
        with torch.no_grad():
            for average, weight in zip(*self._parts()):
                # One tensor at a time: a second set of all weights may not fit
                kept = weight.clone()
                weight.copy_(average)
                average.copy_(kept)
        self.policy.refresh()

    def _parts(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Return this process's part of each average and of each weight."""
        reshard(self.policy.transformer)
        # Local parts: averages of sharded weights need no communication
        local = lambda tensor: tensor.to_local() if isinstance(tensor, DTensor) else tensor
        weights = self.policy.trained_parameters()
        averages = [local(value) for value in self.values.values()]
        return averages, [local(weights[name].detach()) for name in self.values]
