"""The machines that a run is planned or rehearsed for, and how fast their processes communicate."""

from dataclasses import dataclass
from math import inf

from g2rpo_core.errors import UserError

ASSUMED_TFLOPS = 400.0  # of a transformer in bfloat16: 40 % of the 989 dense TFLOP/s in the data sheets of H100 SXM and H200
DECODE_SLOWER, SCORE_SLOWER = 2, 15  # against bfloat16, by the same data sheets: TF32 convolutions, float32 products
RESERVE_GIB = 3.0  # CUDA context, communication buffers, and what the allocator cannot fill
INSIDE, BETWEEN = 400.0, 50.0  # GB/s of a GPU: NVLink of an H100, and a network card of 400 Gbit/s for each GPU
GPUS_OF_A_NODE = 8


@dataclass(frozen=True)
class Machines:
    """The machines of a run.

    gpus: on all nodes together; memory: GiB per GPU; inside, between: GB/s from a GPU to GPUs on its own node, and on other
    nodes.
    """

    gpus: int
    memory: float
    nodes: int = 1
    inside: float = INSIDE
    between: float = BETWEEN

    @property
    def per_node(self) -> int:
        return self.gpus // self.nodes

    def rate(self, between_nodes: bool) -> float:
        """Bytes per second that a GPU sends."""
        return (self.between if between_nodes else self.inside) * 1e9


def checked_machines(command: str, gpus: int, memory: float, nodes: int | None, inside: float, between: float) -> Machines:
    """The machines of a command's options, by default with as few nodes as hold the GPUs; UserError for impossible ones."""
    options = {"gpus": gpus, "nodes": nodes, "memory": memory, "inside": inside, "between": between}
    for option, value in options.items():
        if value is not None and not 0 < value < inf:
            raise UserError(f"{command}: --{option} {value} must be above 0")
    machines = Machines(gpus, memory, nodes or nodes_of(gpus), inside, between)
    if gpus % machines.nodes:
        raise UserError(f"{command}: --gpus {gpus} cannot be divided evenly over {machines.nodes} nodes")
    return machines


def nodes_of(gpus: int) -> int:
    """The smallest number of nodes that holds the GPUs."""
    return -(-gpus // GPUS_OF_A_NODE)
