"""What processes send each other in an iteration, by arithmetic: FSDP2's gathers of weights and sums of gradients.

`g2rpo rehearse` counts the calls that the stages really make; a test compares these figures with it.
"""

from dataclasses import dataclass

from g2rpo_core.estimate.machines import Machines
from g2rpo_core.estimate.tracing import Parameters

FLOAT32 = 4


@dataclass(frozen=True)
class Sharding:
    """shard: processes that share one copy of the weights; there are gpus / shard copies."""

    machines: Machines
    shard: int

    @property
    def copies(self) -> int:
        return self.machines.gpus // self.shard

    @property
    def spans_nodes(self) -> bool:
        """Whether one copy is spread over several nodes."""
        return self.machines.nodes > 1 and bool(self.machines.per_node % self.shard)

    def gathered(self, size: float) -> float:
        """Bytes that a GPU sends in a ring all-gather or reduce-scatter of `size` bytes."""
        return size * (self.shard - 1) / self.shard

    def summed_over_copies(self, size: float) -> float:
        """Bytes that a GPU sends in a ring all-reduce of its part of `size` bytes over all copies."""
        return 2 * size / self.shard * (self.copies - 1) / self.copies


def sent(
    sharding: Sharding,
    counts: Parameters,
    width: int,
    rollout_calls: float,
    updates: list[int],
    kl: bool,
    replica: bool,
    every_call: bool,
) -> tuple[dict[str, float], dict[str, float]]:
    """GB that a GPU sends in an iteration by phase, and the seconds that this takes.

    width: bytes of a gathered weight; updates: the calls of every optimizer step; kl: whether each call also runs the model
    before training; replica: rollouts gather nothing, and the replica is filled once per iteration; every_call: gradients are
    summed in every call.
    """
    if sharding.machines.gpus == 1:
        return {}, {}
    calls = sum(updates)
    sums = calls if every_call else len(updates)
    gradients = FLOAT32 * counts.trained
    inside = {
        "rollout": 0.0 if replica else rollout_calls * sharding.gathered(width * counts.all),
        "update": calls * (3 if kl else 2) * sharding.gathered(width * counts.all) + sums * sharding.gathered(gradients),
        "refresh": sharding.gathered(FLOAT32 * counts.all) if replica else 0.0,
    }
    among_copies = {"update": sums * sharding.summed_over_copies(gradients)}
    seconds = dict.fromkeys(inside, 0.0)
    for phase, size in inside.items():
        seconds[phase] += size / sharding.machines.rate(sharding.spans_nodes)
    for phase, size in among_copies.items():
        seconds[phase] += size / sharding.machines.rate(sharding.machines.nodes > 1)
    return {phase: (size + among_copies.get(phase, 0.0)) / 1e9 for phase, size in inside.items()}, seconds
