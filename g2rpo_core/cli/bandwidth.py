"""Measure an all-reduce of all processes, by NCCL on GPUs, else by gloo.

    torchrun --standalone --nproc-per-node N -m g2rpo_core.cli.bandwidth [MEGABYTES]

The first process prints the GB that each sends in a second, as rings count them.
"""

import sys
import time

import torch
import torch.distributed as dist

from g2rpo_core.distributed.process_group import join
from g2rpo_core.foundation.texts import echo

TIMES = 5


def main() -> None:
    processes, device = join("auto")
    megabytes = int(sys.argv[1]) if sys.argv[1:] else 256 if device.type == "cuda" else 16
    values = torch.ones(megabytes * 250_000, device=device)
    dist.all_reduce(values)  # connects
    start = time.perf_counter()
    for _ in range(TIMES):
        dist.all_reduce(values)
    right = bool(values.eq(float(processes.size) ** (TIMES + 1)).all())  # waits for the device
    seconds = (time.perf_counter() - start) / TIMES
    sent = 2 * values.nbytes * (processes.size - 1) / processes.size
    if processes.rank == 0:
        wrong = "" if right else ", but its sum is WRONG"
        echo(
            f"{'NCCL' if device.type == 'cuda' else 'gloo'}, {processes.size} processes: "
            f"{sent / seconds / 1e9:.1f} GB/s{wrong}"
        )


if __name__ == "__main__":
    main()
