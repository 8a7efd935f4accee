"""Measures a run, by phase: live memory on GPU and host, floating-point operations, and what processes send each other.

It follows storages at PyTorch's dispatch, below autograd and FSDP2: a tensor counts from the operation that makes it until it is
freed.
"""

import functools
import time
import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

GIB = 2**30
BLOCK = 512  # bytes that CUDA's caching allocator rounds up to
COLLECTIVES = ("c10d", "_c10d_functional")


@dataclass(frozen=True)
class Collective:
    """A call among `group` processes, of one node or between nodes; bytes: of the whole tensor that it gathers or reduces."""

    phase: str
    name: str
    group: int
    between_nodes: bool
    bytes: int

    @property
    def sent(self) -> float:
        """Bytes that leave a process in a ring: a gather or a scatter moves all parts but its own once, an all-reduce twice."""
        return self.bytes * (self.group - 1) / self.group * (2 if "allreduce" in self.name.replace("_", "") else 1)


@dataclass
class Repeated:
    """The cost of a call, for equal calls that are not made again; bytes: its peak on a GPU, above what was there before."""

    bytes: int
    flops: int
    collectives: list[Collective]


@dataclass
class Boxed:
    """A storage's device and size."""

    device: str
    bytes: int


@dataclass
class Phase:
    """Peak bytes by device, operations, and seconds of the rehearsal itself."""

    peak: Counter = field(default_factory=Counter)
    flops: int = 0
    seconds: float = 0.0


class Meter(TorchDispatchMode):
    """Measures everything under it; torch.OutOfMemoryError if a GPU would hold more than `limit` bytes.

    per_node: processes of a node; they are numbered node by node.
    """

    def __init__(self, limit: float, per_node: int):
        super().__init__()
        self.limit: float | None = limit
        self.per_node, self.phase = per_node, "start"
        self.phases: dict[str, Phase] = {}
        self.alive: Counter = Counter()
        self.collectives: list[Collective] = []
        self.paused = self.high = 0  # high: peak bytes of a GPU since it was last set
        self._known: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()
        self._costs: dict[object, Repeated] = {}
        self._calls: Counter = Counter()
        self._follow_resizing()

    def _follow_resizing(self) -> None:
        plain_resize = torch.UntypedStorage.resize_
        plain_propagate = ShardingPropagator._propagate_tensor_meta_non_cached

        def resize_(storage, size):  # how FSDP2 frees and allocates what it gathers
            result = plain_resize(storage, size)
            if (box := self._known.get(storage)) is not None:
                self._add(box.device, storage.nbytes() - box.bytes)
                box.bytes = storage.nbytes()
            return result

        def propagate(propagator, schema):  # DTensor tries operations at global shapes: nothing of that is allocated
            self.paused += 1
            try:
                return plain_propagate(propagator, schema)
            finally:
                self.paused -= 1

        torch.UntypedStorage.resize_ = resize_
        ShardingPropagator._propagate_tensor_meta_non_cached = propagate

    def during(self, phase: str, function: Callable) -> Callable:
        """The function as a phase of its own, but within another that it is part of."""

        @functools.wraps(function)
        def wrapped(*arguments: Any, **more: Any) -> Any:
            before, self.phase, start = self.phase, phase, time.perf_counter()
            for device in list(self.alive):
                self._add(device, 0)
            try:
                return function(*arguments, **more)
            finally:
                self._of(phase).seconds += time.perf_counter() - start
                self.phase = before

        return wrapped

    def sometimes(self, key: object, really: Callable[[], Any], instead: Callable[[], Any]) -> Any:
        """Makes only the first two of equal calls without gradients.

        The others count the same cost and return a result of that shape.
        """
        self._calls[key] += 1
        if self._calls[key] > 2:
            cost = self._costs[key]
            self._of(self.phase).flops += cost.flops
            self.collectives += cost.collectives
            self._add("cuda", cost.bytes)
            self._add("cuda", -cost.bytes)
            return instead()
        flops, count, alive, high = self._of(self.phase).flops, len(self.collectives), self.alive["cuda"], self.high
        self.high = alive
        result = really()
        self._costs[key] = Repeated(self.high - alive, self._of(self.phase).flops - flops, self.collectives[count:])
        self.high = max(self.high, high)
        return result

    def so_far(self) -> tuple[int, int]:
        """Operations of this phase and collectives up to now."""
        return self._of(self.phase).flops, len(self.collectives)

    def repeat(self, start: tuple[int, int], end: tuple[int, int], times: int) -> None:
        """Counts `times` more what was done between two moments of this phase."""
        self._of(self.phase).flops += times * (end[0] - start[0])
        self.collectives += times * self.collectives[start[1] : end[1]]

    def _of(self, phase: str) -> Phase:
        return self.phases.setdefault(phase, Phase())

    def _add(self, device: str, size: int) -> None:
        self.alive[device] += size
        if size > 0 and device == "cuda" and self.limit and self.alive[device] > self.limit:
            limit, self.limit = self.limit, None
            raise torch.OutOfMemoryError(
                f"{self.alive[device] / GIB:.1f} GiB of {limit / GIB:.1f} in use in the phase {self.phase!r}"
            )
        if device == "cuda":
            self.high = max(self.high, self.alive[device])
        peak = self._of(self.phase).peak
        peak[device] = max(peak[device], self.alive[device])

    def _free(self, box: Boxed) -> None:
        self.alive[box.device] -= box.bytes

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        if any(issubclass(one, DTensor) for one in types):
            return NotImplemented  # its own dispatch comes first, then its local operations come here
        if operation is torch.ops._c10d_functional.wait_tensor.default:
            return args[0]  # without data it would be a new tensor
        result = operation(*args, **(kwargs or {}))
        if self.paused:
            return result
        if count := flop_registry.get(operation._overloadpacket):
            self._of(self.phase).flops += count(*args, **(kwargs or {}), out_val=result)
        if operation.namespace in COLLECTIVES and "barrier" not in operation._overloadpacket.__name__:
            self._note(operation, args)
        self._count(result, args, kwargs)
        return result

    def _count(self, result: object, args: object, kwargs: object) -> None:
        given: set[int] | None = None
        for tensor in tree_leaves(result):
            if not isinstance(tensor, FakeTensor) or tensor.fake_device.type == "meta":
                continue
            storage = tensor.untyped_storage()
            if storage in self._known:
                continue
            if given is None:
                given = {id(one.untyped_storage()) for one in tree_leaves((args, kwargs)) if isinstance(one, FakeTensor)}
            if id(storage) not in given:
                device, size = tensor.fake_device.type, storage.nbytes()
                box = Boxed(device, -(-size // BLOCK) * BLOCK if device == "cuda" else size)
                self._known[storage] = box
                weakref.finalize(storage, self._free, box)
                self._add(device, box.bytes)

    def _note(self, operation, args) -> None:
        name = operation._overloadpacket.__name__
        size = max(tensor.numel() * tensor.element_size() for tensor in tree_leaves(args) if isinstance(tensor, torch.Tensor))
        if operation.namespace == "_c10d_functional":
            group = dist.distributed_c10d._resolve_process_group(args[-1])
            size *= group.size() if "all_gather" in name else 1
        else:
            boxed = next(one for one in args if isinstance(one, torch.ScriptObject) and "ProcessGroup" in str(one._type()))
            group = dist.ProcessGroup.unbox(boxed)
        nodes = {rank // self.per_node for rank in dist.get_process_group_ranks(group)}
        self.collectives.append(Collective(self.phase, name, group.size(), len(nodes) > 1, size))
