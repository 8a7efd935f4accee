"""Measure a run by phase: memory of GPU and host, FLOPs, and communication.

It follows storages at PyTorch's dispatch, below autograd and FSDP2: a tensor counts from the
operation that makes it until it is freed.
"""

import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

GIB = 2**30
BLOCK = 512  # bytes that CUDA's caching allocator rounds up to
COLLECTIVES = ("c10d", "_c10d_functional")


@dataclass(frozen=True)
class Collective:
    """One call among processes."""

    phase: str
    name: str
    group: int
    """How many processes take part."""
    between_nodes: bool
    bytes: int
    """Of the whole tensor that it gathers or reduces."""

    @property
    def sent(self) -> float:
        """Return the bytes that a process sends in a ring.

        A gather or scatter moves all parts but its own once, an all-reduce twice.
        """
        return (
            self.bytes
            * (self.group - 1)
            / self.group
            * (2 if "allreduce" in self.name.replace("_", "") else 1)
        )


@dataclass
class Repeated:
    """The cost of a call, for equal calls that are not made again."""

    bytes: int
    """Its peak on a GPU, above what was there before."""
    flops: int
    collectives: list[Collective]
    result: Callable[[], torch.Tensor]
    """Makes a tensor like its result."""


@dataclass
class Boxed:
    """A storage's device and size."""

    device: str
    bytes: int


@dataclass
class Phase:
    """The cost of a phase."""

    peak: Counter = field(default_factory=Counter)
    """Bytes by device."""
    flops: int = 0
    seconds: float = 0.0
    """Of the rehearsal itself."""


class Meter(TorchDispatchMode):
    """Dispatch mode that measures everything under it.

    torch.OutOfMemoryError if a GPU would hold more than `limit` bytes.

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

    def resized(self, storage: torch.UntypedStorage) -> None:
        """Follow a storage whose size has changed: so FSDP2 frees and allocates what it gathers."""
        if (box := self._known.get(storage)) is not None:
            self._add(box.device, storage.nbytes() - box.bytes)
            box.bytes = storage.nbytes()

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Count nothing within the block."""
        self.paused += 1
        try:
            yield
        finally:
            self.paused -= 1

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Count what runs within the block as this phase, except for phases within it."""
        before, self.phase, start = self.phase, phase, time.perf_counter()
        for device in list(self.alive):
            self._add(device, 0)
        try:
            yield
        finally:
            self._of(phase).seconds += time.perf_counter() - start
            self.phase = before

    def call(self, key: object, function: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Run only the first two calls of a key; count the others at the same cost.

        They return a tensor of the same shape.
        """
        self._calls[key] += 1
        if self._calls[key] > 2:
            cost = self._costs[key]
            self._of(self.phase).flops += cost.flops
            self.collectives += cost.collectives
            self._add("cuda", cost.bytes)
            self._add("cuda", -cost.bytes)
            return cost.result()
        flops, count, alive, high = (
            self._of(self.phase).flops,
            len(self.collectives),
            self.alive["cuda"],
            self.high,
        )
        self.high = alive
        result = function()
        like = partial(torch.empty, result.shape, dtype=result.dtype, device=result.device)
        self._costs[key] = Repeated(
            self.high - alive, self._of(self.phase).flops - flops, self.collectives[count:], like
        )
        self.high = max(self.high, high)
        return result

    def now(self) -> tuple[int, int]:
        """Return this phase's floating-point operations and the number of collectives so far."""
        return self._of(self.phase).flops, len(self.collectives)

    def repeat(self, start: tuple[int, int], end: tuple[int, int], times: int) -> None:
        """Count `times` more what was done between two moments (`now`) of this phase."""
        self._of(self.phase).flops += times * (end[0] - start[0])
        self.collectives += times * self.collectives[start[1] : end[1]]

    def _of(self, phase: str) -> Phase:
        return self.phases.setdefault(phase, Phase())

    def _add(self, device: str, size: int) -> None:
        self.alive[device] += size
        if size > 0 and device == "cuda" and self.limit and self.alive[device] > self.limit:
            limit, self.limit = self.limit, None
            raise torch.OutOfMemoryError(
                f"{self.alive[device] / GIB:.1f} GiB of {limit / GIB:.1f} in use in the phase "
                f"{self.phase!r}"
            )
        if device == "cuda":
            self.high = max(self.high, self.alive[device])
        peak = self._of(self.phase).peak
        peak[device] = max(peak[device], self.alive[device])

    def _free(self, box: Boxed) -> None:
        self.alive[box.device] -= box.bytes

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        if any(issubclass(one, DTensor) for one in types):
            # Its own dispatch comes first, then its local operations come here
            return NotImplemented
        if operation is torch.ops._c10d_functional.wait_tensor.default:
            return args[0]  # without data it would be a new tensor
        result = operation(*args, **(kwargs or {}))
        if self.paused:
            return result
        if count := flop_registry.get(operation._overloadpacket):
            self._of(self.phase).flops += count(*args, **(kwargs or {}), out_val=result)
        if (
            operation.namespace in COLLECTIVES
            and "barrier" not in operation._overloadpacket.__name__
        ):
            self._note(operation, args)
        self._count(result, args, kwargs)
        return result

    def _count(self, result: object, args: object, kwargs: object) -> None:
        """Count the storages that an operation has made, not those that it returns views of."""
        given: set[int] | None = None
        for tensor in tree_leaves(result):
            if not isinstance(tensor, FakeTensor) or tensor.fake_device.type == "meta":
                continue
            storage = tensor.untyped_storage()
            if storage in self._known:
                continue
            if given is None:
                given = {
                    id(one.untyped_storage())
                    for one in tree_leaves((args, kwargs))
                    if isinstance(one, FakeTensor)
                }
            if id(storage) not in given:
                device, size = tensor.fake_device.type, storage.nbytes()
                box = Boxed(device, -(-size // BLOCK) * BLOCK if device == "cuda" else size)
                self._known[storage] = box
                weakref.finalize(storage, self._free, box)
                self._add(device, box.bytes)

    def _note(self, operation, args) -> None:
        """Add a collective, with the processes that take part."""
        name = operation._overloadpacket.__name__
        size = max(
            tensor.numel() * tensor.element_size()
            for tensor in tree_leaves(args)
            if isinstance(tensor, torch.Tensor)
        )
        if operation.namespace == "_c10d_functional":
            group = dist.distributed_c10d._resolve_process_group(args[-1])
            size *= group.size() if "all_gather" in name else 1
        else:
            boxed = next(
                one
                for one in args
                if isinstance(one, torch.ScriptObject) and "ProcessGroup" in str(one._type())
            )
            group = dist.ProcessGroup.unbox(boxed)
        nodes = {rank // self.per_node for rank in dist.get_process_group_ranks(group)}
        self.collectives.append(Collective(self.phase, name, group.size(), len(nodes) > 1, size))
