"""An exponential moving average (EMA) of the trained weights, which is evaluated and kept instead of them."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.distributed.tensor import DTensor
from torch.optim.swa_utils import get_ema_multi_avg_fn

from g2rpo_core.models.parallelize import reshard
from g2rpo_core.models.policy import Policy
from g2rpo_core.training.settings import EmaSettings


class Ema:
    """The average of the policy's trained parameters, float32, spread over the processes as they are.

    `values`: name -> average, at first the weights themselves. As in flow_grpo's `ema.py`, the decay of step n (from 0) is
    min((1 + n) / (10 + n), `settings.decay`), so that the first weights are soon forgotten.
    """

    def __init__(self, policy: Policy, settings: EmaSettings):
        self.policy, self.settings = policy, settings
        reshard(policy.transformer)
        self.values = {name: parameter.detach().clone() for name, parameter in policy.trained_parameters().items()}

    def update(self, step: int) -> None:
        """Adds the weights after the run's optimizer step `step`, from 0, if that is the last of every `settings.every`."""
        if (step + 1) % self.settings.every == 0:
            decay = min((1 + step) / (10 + step), self.settings.decay)
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
                kept = weight.clone()
                weight.copy_(average)
                average.copy_(kept)
        self.policy.refresh()

    def _parts(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """This process's part of each average and of each weight."""
        reshard(self.policy.transformer)
        local = lambda tensor: tensor.to_local() if isinstance(tensor, DTensor) else tensor
        weights = self.policy.trained_parameters()
        return [local(value) for value in self.values.values()], [local(weights[name].detach()) for name in self.values]
