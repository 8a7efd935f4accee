"""Joins a run's processes, shares work, and exchanges values; a single process is a group, too."""

import atexit
import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Annotated, Literal

import torch
import torch.distributed as dist
from accelerate import PartialState
from pydantic import Field

from g2rpo_core.foundation.errors import UserError
from g2rpo_core.numerics.cuda import prepare
from g2rpo_core.numerics.parent import LAUNCHER, die_with_parent

# As a setting: how many, or one for each GPU
Processes = Annotated[int, Field(gt=0, le=10**6)] | Literal["auto"]
# Of a collective: the first process may write a large file while the others wait
TIMEOUT = timedelta(hours=1)


@dataclass(frozen=True)
class ProcessGroup:
    """Process `rank` of `size`.

    Every method but `share` is collective: all processes call it, in the same order.
    """

    rank: int = 0
    size: int = 1

    def share(self, prompts: int) -> range:
        """Return this process's part of the prompts; UserError if they cannot be shared evenly."""
        if prompts % self.size:
            raise UserError(
                f"training.prompts_per_iteration: {prompts} cannot be shared evenly by {self.size} "
                "processes: change one of the two"
            )
        return range(self.rank * prompts // self.size, (self.rank + 1) * prompts // self.size)

    def gather(self, value: object) -> list:
        """Return the value of every process, by rank."""
        values = [value] * self.size
        if self.size > 1:
            dist.all_gather_object(values, value, group=dist.group.WORLD)
        return values

    def mean(self, values: Sequence[float]) -> list[float]:
        """Return the mean of each value over the processes."""
        return [sum(column) / self.size for column in zip(*self.gather(list(values)))]

    def first(self, message: str | None) -> str | None:
        """Return the first message that any process has, so that all processes stop together."""
        return next((message for message in self.gather(message) if message is not None), None)

    def barrier(self) -> None:
        """Wait until all processes are here."""
        self.gather(None)


ALONE = ProcessGroup()


def num_processes(processes: Processes, items: int | None = None) -> int:
    """Return the number of processes in a setting.

    `auto`: as many as were started, else one for each GPU here, or one without a GPU. items: what
    the processes have to share evenly; `auto` then starts fewer where the GPUs could not.
    """
    if processes != "auto":
        return processes
    if started := int(os.environ.get("WORLD_SIZE", "0")):
        return started
    gpus = max(1, torch.cuda.device_count())
    return (
        gpus if items is None else max(count for count in range(1, gpus + 1) if items % count == 0)
    )


def join(processes: Processes, items: int | None = None) -> tuple[ProcessGroup, torch.device]:
    """Join the process group that `accelerate launch` or torchrun started; return it and a device.

    The device is this process's own GPU, or the CPU. UserError if it is not the group that was
    asked for, so that a process never silently runs alone, or if dead processes could not be
    replaced.
    """
    asked, size = num_processes(processes, items), int(os.environ.get("WORLD_SIZE", "1"))
    if "WORLD_SIZE" in os.environ:
        die_with_parent(int(os.environ.get(LAUNCHER, "0")) or None)
    if size != asked:
        raise UserError(
            f"processes: {asked} asked for, but {size} were started: give both the same number"
        )
    cuda = torch.cuda.is_available()
    local = int(os.environ.get("LOCAL_RANK", "0"))
    if cuda and local >= torch.cuda.device_count():
        raise UserError(
            f"processes: {local + 1} on this machine, which has {torch.cuda.device_count()} GPUs: "
            "ask for fewer"
        )
    device = prepare(torch.device("cuda", local) if cuda else torch.device("cpu"))
    if size == 1:
        return ALONE, device
    restarts = int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0"))
    if restarts and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        # The launcher's store outlives the processes: restarted ones would read the addresses of
        # dead ones in it, and wait
        raise UserError(
            "processes: --max_restarts needs --rdzv_backend c10d, "
            "and TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 in the environment, on every node"
        )
    # Without cpu=True and without CUDA, each process would be its own group
    backend = {"backend": "cpu:gloo,cuda:nccl"} if cuda else {"cpu": True}
    state = PartialState(**backend, timeout=TIMEOUT)
    if state.num_processes != size:
        raise UserError(f"processes: {size} asked for, but {state.num_processes} joined")
    # its threads, if left running, may abort an interpreter that is done
    atexit.register(state.destroy_process_group)
    return ProcessGroup(state.process_index, size), device
