"""Ties a process to the one that started it; imports nothing that takes long."""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1  # linux/prctl.h
# In the environment of processes that this project's launcher started: its number
LAUNCHER = "G2RPO_LAUNCHER"


def die_with_parent(parent: int | None = None) -> None:
    """Make this process, on Linux, die when its parent ends, however that ends.

    Otherwise it would hang and keep its memory. parent: the process that must be its parent; None:
    whichever is, such as a shell, srun, mpirun or a container's first process. If the parent ended
    before this call, the system has given this process another one: it says so, and ends with
    status 1.
    """
    if sys.platform == "linux":
        parent = parent or os.getppid()
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            print(  # noqa: T201 - of numbers alone, before anything is imported
                f"error: process {os.getpid()} ends, because its launcher, process {parent}, "
                "has ended",
                file=sys.stderr,
                flush=True,
            )
            os._exit(1)
