"""Runtime interface of a stage: process group, model calls, weight loading, run state.

The rehearsal overrides it.
"""

import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, TypeVar

import torch

from g2rpo_core.distributed import checkpoint
from g2rpo_core.distributed.launcher import join_processes
from g2rpo_core.distributed.process_group import Processes, ProcessGroup
from g2rpo_core.foundation.errors import UserError
from g2rpo_core.hub.model_store import LOCK, ModelStore
from g2rpo_core.numerics.cuda import why_none

T = TypeVar("T")
NEEDS_GPU = 2**30  # bytes of a pipeline from which a run on the CPU takes weeks
ON_CPU = "G2RPO_ON_CPU"  # the environment variable that allows it


def check_device(models: ModelStore) -> None:
    """Check that models of a published size have a GPU; UserError naming why torch finds none.

    Models that are missing are reported later.
    """
    if not (models.root / LOCK).exists():
        return
    size = sum(about["size"] for about in models.entry("pipeline")["files"].values())
    if size >= NEEDS_GPU and os.environ.get(ON_CPU) != "1" and not torch.cuda.is_available():
        raise UserError(
            f"{models.root}: the pipeline has {size / 2**30:.0f} GiB, and torch finds no GPU here: "
            f"{why_none()}; else go to a machine "
            f"with one, or set {ON_CPU}=1 to compute on the CPU for weeks"
        )


class Runtime:
    """The runtime of a stage: each `main` takes one, and `Policy` hands it on.

    Every method here does the real thing; there is nothing to know about it to change a method. The
    rehearsal overrides all of them to run the same stage without GPUs, weights and time: whatever
    it replaces of this project's code is a method here.
    """

    def join(
        self, asked: Processes, items: int | None = None, grace: float = 0.0
    ) -> tuple[ProcessGroup, torch.device]:
        """Return this process's group and device, see `join_processes`."""
        return join_processes(asked, items, grace)

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Name what runs within the block; the innermost name counts."""
        return nullcontext()

    def read(self, function: Callable[..., T], *arguments: Any) -> T:
        """Call a function that reads weights from files."""
        return function(*arguments)

    def call(
        self, model: torch.nn.Module, function: Callable[..., torch.Tensor], *inputs: torch.Tensor
    ) -> torch.Tensor:
        """Call a model through `function`.

        Without gradients, all calls with a first input of equal shape cost the same.
        """
        return function(*inputs)

    def attempt(self, function: Callable[..., None], *arguments: Any, **how: Any) -> None:
        """Call a function that tries something on this machine's device with numbers."""
        function(*arguments, **how)

    def passes(self, batches: Sequence[T]) -> Iterable[T]:
        """Return the batches of an update that get a forward and backward pass, last one last."""
        return batches

    def start(self, published: ModelStore, name: str | None) -> Path | None:
        """Return the published weights that a run starts from; None for the base model's."""
        return None if name is None else published.weights(name)

    def checkpoints(
        self, folder: Path, keep: int, processes: ProcessGroup
    ) -> checkpoint.Checkpoints:
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


REAL = Runtime()
