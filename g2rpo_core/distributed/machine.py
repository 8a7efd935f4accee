"""Defines what a run needs of its machine: other processes, calls of models, files of weights, and a place for its state."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, TypeVar

import torch

from g2rpo_core.common.model_store import ModelStore, check_device
from g2rpo_core.distributed import checkpoint
from g2rpo_core.distributed.launcher import join_processes
from g2rpo_core.distributed.process_group import Processes, ProcessGroup

T = TypeVar("T")


class Machine:
    """The machine that a stage runs on; each `main` takes one, and `Policy` hands it on to what it trains and samples.

    Every method does the real thing. A rehearsal overrides all of them to run the same stage without GPUs, weights and time:
    whatever it replaces of this project's code is a method here.
    """

    def join(self, asked: Processes, items: int | None = None, grace: float = 0.0) -> tuple[ProcessGroup, torch.device]:
        """Return this process's group and device among the requested processes, see `join_processes`."""
        return join_processes(asked, items, grace)

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Name what runs within the block; the innermost name counts."""
        return nullcontext()

    def read(self, function: Callable[..., T], *arguments: Any) -> T:
        """Call a function that reads weights from files."""
        return function(*arguments)

    def call(self, model: torch.nn.Module, function: Callable[..., torch.Tensor], *inputs: torch.Tensor) -> torch.Tensor:
        """Call a model through `function`; without gradients, all calls with a first input of equal shape cost the same."""
        return function(*inputs)

    def attempt(self, function: Callable[..., None], *arguments: Any, **how: Any) -> None:
        """Call a function that tries something on this machine's device with numbers."""
        function(*arguments, **how)

    def passes(self, batches: Sequence[T]) -> Iterable[T]:
        """Return the batches of an update that get a forward and backward pass each, ending with the last."""
        return batches

    def start(self, published: ModelStore, name: str | None) -> Path | None:
        """Return the weights that a run starts from, of these published ones; None for those of the base model."""
        return None if name is None else published.weights(name)

    def checkpoints(self, folder: Path, keep: int, processes: ProcessGroup) -> checkpoint.Checkpoints:
        """Return what writes and reads the checkpoints in a scratch folder."""
        return checkpoint.Checkpoints(folder, keep, processes)

    check_device = staticmethod(check_device)
    # The functions of `checkpoint` on the folder with a run's state
    claim = staticmethod(checkpoint.claim)
    scratch = staticmethod(checkpoint.scratch)
    check_room = staticmethod(checkpoint.check_room)
    publish = staticmethod(checkpoint.publish)
    discard = staticmethod(checkpoint.discard)
    release = staticmethod(checkpoint.release)


REAL = Machine()
