"""The machines that a run is planned or rehearsed for, and the traffic between its processes.

The traffic is FSDP2's gathers of weights and sums of gradients. `g2rpo rehearse` counts the calls
that the stages really make; a test compares these figures with it.
"""

from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING

from g2rpo_core.foundation.errors import UserError

if TYPE_CHECKING:  # imports torch and diffusers, which would slow down --help
    from g2rpo_core.estimate.tracing import Parameters

# of a transformer in bfloat16: an H100 was seen to reach 354 in eager mode and 564 compiled
# (benchmarks/README.md)
ASSUMED_TFLOPS = 400.0
# Against bfloat16, by the cards' data sheets: TF32 convolutions, float32 products
DECODE_SLOWER, SCORE_SLOWER = 2, 15
RESERVE_GIB = 3.0  # CUDA context, communication buffers, and what the allocator cannot fill
INSIDE, BETWEEN = 400.0, 50.0  # GB/s of a GPU: an H100's NVLink, a network card of 400 Gbit/s each
DISK = 2.0  # GB/s at which a node writes
GPUS_OF_A_NODE = 8
FLOAT32 = 4


@dataclass(frozen=True)
class Rate:
    """How fast a GPU computes a forward of the transformer, and where that comes from."""

    tflops: float = ASSUMED_TFLOPS
    ms: float | None = None
    """Milliseconds per forward evaluation, instead of `tflops`."""
    source: str = (
        f"assumed: {ASSUMED_TFLOPS:.0f} TFLOP/s in bfloat16; --card or --rate give that of a GPU"
    )

    def ms_of(self, flops: float) -> float:
        """Return the milliseconds of a forward evaluation with so many operations."""
        return self.ms or flops / (self.tflops * 1e9)


ASSUMED = Rate()


@dataclass(frozen=True)
class Machines:
    """The machines of a run."""

    gpus: int
    """On all nodes together."""
    memory: float
    """GiB per GPU."""
    nodes: int = 1
    inside: float = INSIDE
    """GB/s from a GPU to GPUs on its own node."""
    between: float = BETWEEN
    """GB/s from a GPU to GPUs on other nodes."""

    @property
    def per_node(self) -> int:
        return self.gpus // self.nodes

    def rate(self, between_nodes: bool) -> float:
        """Return the bytes per second that a GPU sends."""
        return (self.between if between_nodes else self.inside) * 1e9


def checked_machines(
    command: str, gpus: int, memory: float, nodes: int | None, inside: float, between: float
) -> Machines:
    """Return the machines of a command's options; UserError for impossible ones.

    nodes: None for as few as hold the GPUs.
    """
    options = {"gpus": gpus, "nodes": nodes, "memory": memory, "inside": inside, "between": between}
    for option, value in options.items():
        if value is not None and not 0 < value < inf:
            raise UserError(f"{command}: --{option} {value} must be above 0")
    machines = Machines(gpus, memory, nodes or -(-gpus // GPUS_OF_A_NODE), inside, between)
    if gpus % machines.nodes:
        raise UserError(
            f"{command}: --gpus {gpus} cannot be divided evenly over {machines.nodes} nodes"
        )
    return machines


@dataclass(frozen=True)
class Sharding:
    """How the weights are spread over the GPUs."""

    machines: Machines
    shard: int
    """Processes that share one copy of the weights."""

    @property
    def copies(self) -> int:
        """Return the number of copies of the weights."""
        return self.machines.gpus // self.shard

    def gathered(self, size: float) -> float:
        """Return the bytes that a GPU sends in a ring all-gather or reduce-scatter of `size`."""
        return size * (self.shard - 1) / self.shard


def sent(
    sharding: Sharding,
    counts: "Parameters",
    width: int,
    rollout_calls: float,
    updates: list[int],
    kl: bool,
    replica: bool,
    every_call: bool,
) -> tuple[dict[str, float], dict[str, float]]:
    """Return the GB that a GPU sends in an iteration by phase, and the seconds that this takes.

    width: bytes of a gathered weight; updates: the calls of every optimizer step; kl: whether each
    call also runs the model before training; replica: rollouts gather nothing, and the replica is
    filled once per iteration; every_call: gradients are summed in every call.
    """
    if sharding.machines.gpus == 1:
        return {}, {}
    calls = sum(updates)
    sums = calls if every_call else len(updates)
    gradients = FLOAT32 * counts.trained
    inside = {
        "rollout": 0.0 if replica else rollout_calls * sharding.gathered(width * counts.all),
        "update": calls * (3 if kl else 2) * sharding.gathered(width * counts.all)
        + sums * sharding.gathered(gradients),
        "refresh": sharding.gathered(FLOAT32 * counts.all) if replica else 0.0,
    }
    # A ring all-reduce of its shard over all copies
    copies, nodes = sharding.copies, sharding.machines.nodes
    among_copies = {"update": sums * 2 * gradients / sharding.shard * (copies - 1) / copies}
    one_spans_nodes = nodes > 1 and bool(sharding.machines.per_node % sharding.shard)
    seconds = dict.fromkeys(inside, 0.0)
    for phase, size in inside.items():
        seconds[phase] += size / sharding.machines.rate(one_spans_nodes)
    for phase, size in among_copies.items():
        seconds[phase] += size / sharding.machines.rate(nodes > 1)
    return {
        phase: (size + among_copies.get(phase, 0.0)) / 1e9 for phase, size in inside.items()
    }, seconds
