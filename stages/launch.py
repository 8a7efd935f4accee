"""How a stage gets its processes, its device and its policy: the same for training and evaluation."""

import os
import platform
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from g2rpo_core.common.model_store import ModelStore
from g2rpo_core.data.embeddings import DTYPES
from g2rpo_core.distributed.process_group import Processes, ProcessGroup, join, num_processes
from g2rpo_core.distributed.termination import STATUS
from g2rpo_core.models.flux import Policy
from g2rpo_core.sampling.settings import SamplingSettings
from stages.common import STATUS_FOLDER


def join_processes(asked: Processes) -> tuple[ProcessGroup, torch.device]:
    """This process's place and device among those that were asked for.

    Without torchrun, and where more than one process is asked for, the same command is run by torchrun on this machine instead, and
    this ends with its status; on several nodes, start torchrun there yourself with the stage as its module.
    """
    if "WORLD_SIZE" not in os.environ and (count := num_processes(asked)) > 1:
        sys.exit(_torchrun(count))
    return join(asked)


def _torchrun(count: int) -> int:
    spec = sys.modules["__main__"].__spec__
    module = spec.name if spec else ""
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


def load_policy(models: Path, sampling: SamplingSettings, device: torch.device, **how) -> Policy:
    """The profile's pipeline, sampling as the section `sampling` says; how: arguments of Policy.load in the place of these."""
    size = {"height": sampling.height, "width": sampling.width}
    settings = {**size, "guidance": sampling.guidance, "dtype": DTYPES[sampling.dtype], "device": device}
    return Policy.load(ModelStore(models).folder("pipeline"), **settings | how)


def machine() -> dict[str, object]:
    """What seconds depend on: the processor or GPU, and PyTorch's version and threads."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"{platform.machine()}, {os.cpu_count()} CPUs"
    return {"device": device, "threads": torch.get_num_threads(), "torch": torch.__version__}
