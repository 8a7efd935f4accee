"""Measure a stage by phase: memory of a GPU, floating-point operations, and communication.

It follows storages at PyTorch's dispatch, below autograd and FSDP2: a tensor counts from the
operation that makes it until it is freed.
"""

import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from g2rpo_core.estimate.machines import Machines

BLOCK = 512  # bytes that CUDA's caching allocator rounds up to
UNSEEN = "unseen"  # the phase of operations that a GPU does not make
COLLECTIVES = ("c10d", "_c10d_functional")


class Meter(TorchDispatchMode):
    """Dispatch mode that measures everything under it, as one process on these machines."""

    def __init__(self, machines: Machines) -> None:
        super().__init__()
        self.machines, self.phase = machines, "start"
        self.alive = 0
        """Bytes on the GPU."""
        self.peaks: Counter = Counter()
        """Bytes on the GPU, by phase."""
        self.costs: Counter = Counter()
        """By phase and kind: `flops`, bytes that are `sent`, and the `seconds` that this takes."""
        self._sizes: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()
        self._calls: dict[object, list[Counter]] = {}

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Count what runs within the block as this phase, except for phases within it."""
        before, self.phase = self.phase, phase
        if phase == "iteration":  # other tensors are alive now
            self._calls.clear()
        self._add(0)
        try:
            yield
        finally:
            self.phase = before

    def repeated(self, key: object, function: Callable[[], Any], like: Callable[[], Any]) -> Any:
        """Call a function, but only the first two times that a key has in a phase and iteration.

        Then return what `like` makes, and count the cost of the second call.
        """
        costs = self._calls.setdefault((self.phase, key), [])
        if len(costs) == 2:
            self.costs += costs[1]
            return like()
        before = self.costs.copy()
        result = function()
        costs.append(self.costs - before)
        return result

    def resized(self, storage: torch.UntypedStorage) -> None:
        """Follow a storage whose size has changed: so FSDP2 frees and allocates what it gathers."""
        if (box := self._sizes.get(storage)) is not None:
            self._add(storage.nbytes() - box[0])
            box[0] = storage.nbytes()

    def _add(self, size: int) -> None:
        self.alive += size
        self.peaks[self.phase] = max(self.peaks[self.phase], self.alive)

    def _free(self, box: list[int]) -> None:
        self.alive -= box[0]

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        if any(issubclass(one, DTensor) for one in types):
            # Its own dispatch comes first, then its local operations come here
            return NotImplemented
        if operation is torch.ops._c10d_functional.wait_tensor.default:
            return args[0]  # without data it would be a new tensor
        result = operation(*args, **(kwargs or {}))
        if self.phase == UNSEEN:
            return result
        name = operation._overloadpacket.__name__
        if count := flop_registry.get(operation._overloadpacket):
            flops = count(*args, **(kwargs or {}), out_val=result)
            self.costs[self.phase, "flops"] += flops
        if operation.namespace in COLLECTIVES and "barrier" not in name:
            self._note(operation, name, args)
        given = {storage._cdata for storage in _on_gpu((args, kwargs))}
        for storage in _on_gpu(result):
            # What an operation has made, not what it returns views of
            if storage not in self._sizes and storage._cdata not in given:
                self._sizes[storage] = box = [-(-storage.nbytes() // BLOCK) * BLOCK]
                weakref.finalize(storage, self._free, box)
                self._add(box[0])
        return result

    def _note(self, operation, name: str, args: tuple) -> None:
        """Count what a process sends in a collective's ring, and how long that takes."""
        tensors = [each for each in tree_leaves(args) if isinstance(each, torch.Tensor)]
        size = max(tensor.numel() * tensor.element_size() for tensor in tensors)
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
        # A gather or scatter moves all parts but its own once, an all-reduce twice
        times = 2 if "allreduce" in name.replace("_", "") else 1
        sent = times * size * (group.size() - 1) / group.size()
        nodes = {rank // self.machines.per_node for rank in dist.get_process_group_ranks(group)}
        self.costs[self.phase, "sent"] += sent
        self.costs[self.phase, "seconds"] += sent / self.machines.rate(len(nodes) > 1)


def _on_gpu(tree: object) -> list[torch.UntypedStorage]:
    """Return the storages of all tensors on the simulated GPU."""
    return [
        leaf.untyped_storage()
        for leaf in tree_leaves(tree)
        if isinstance(leaf, FakeTensor) and leaf.fake_device.type == "cuda"
    ]
