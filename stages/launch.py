"""How a stage gets its processes, its device and its policy: the same for training and evaluation."""

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from g2rpo_core.config import EvaluationSettings, Processes, SamplingSettings
from g2rpo_core.embeddings import DTYPES
from g2rpo_core.model_store import ModelStore
from g2rpo_core.policy import Policy
from g2rpo_core.termination import STATUS
from g2rpo_core.world import World, join, world_asked
from stages.common import STATUS_FOLDER


def processes(asked: Processes) -> tuple[World, torch.device]:
    """This process's place and device in the world that was asked for.

    Without torchrun, and where more than one process is asked for, the same command is run by torchrun on this machine instead, and
    this ends with its status; on several nodes, start torchrun there yourself with the stage as its module.
    """
    if "WORLD_SIZE" not in os.environ and (count := world_asked(asked)) > 1:
        sys.exit(_torchrun(count))
    return join(asked)


def _torchrun(count: int) -> int:
    module = sys.modules["__main__"].__spec__.name
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}", "-m", module]
    terminated = []
    with tempfile.TemporaryDirectory() as folder:  # torchrun's own status is 1 whatever a process ended by
        child = subprocess.Popen([*command, *sys.argv[1:]], env={**os.environ, STATUS_FOLDER: folder})

        def hand_on(*_) -> None:
            terminated.append(True)
            child.terminate()

        signal.signal(signal.SIGTERM, hand_on)
        status = child.wait()
        failed = [int(file.name) for file in Path(folder).iterdir()]
    return STATUS if terminated else min(failed, default=status)


def load_policy(
    models: Path, size: SamplingSettings | EvaluationSettings, sampling: SamplingSettings, device: torch.device, **how
) -> Policy:
    """The profile's pipeline at a picture size, computing as the section `sampling` says; how: further arguments of Policy.load."""
    return Policy.load(
        ModelStore(models).folder("pipeline"),
        height=size.height, width=size.width, guidance=sampling.guidance, dtype=DTYPES[sampling.dtype], device=device, **how,
    )  # fmt: skip
