"""How a stage gets its processes, its device and its policy: the same for training and evaluation."""

import os
import platform
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from g2rpo_core.common.processes import die_with_parent
from g2rpo_core.data.embeddings import DTYPES
from g2rpo_core.distributed.process_group import Processes, ProcessGroup, join, num_processes
from g2rpo_core.distributed.termination import SIGNALS, STATUS
from g2rpo_core.sampling.settings import SamplingSettings
from stages.common import STATUS_FOLDER, RunPaths

CONFIGURATIONS = Path(__file__).parent / "accelerate"


def join_processes(asked: Processes) -> tuple[ProcessGroup, torch.device]:
    """This process's group and device among the requested processes.

    If more than one is requested and none has been started, `accelerate launch` runs the same command on this machine, and this
    process ends with its status. accelerate or torchrun may also be started by hand, on one or several machines.
    """
    if "WORLD_SIZE" not in os.environ and (count := num_processes(asked)) > 1:
        sys.exit(_launch(count))
    return join(asked)


def _launch(count: int) -> int:
    spec = sys.modules["__main__"].__spec__
    module = spec.name if spec else ""
    how = ["--config_file", str(CONFIGURATIONS / "eight_gpus.yaml"), "--num_processes", str(count)]
    command = [sys.executable, "-m", "stages.launcher", *how, "-m", module]
    terminated = []
    with tempfile.TemporaryDirectory() as folder:  # accelerate's own status is 1, whatever the status of a process
        environment = {**os.environ, STATUS_FOLDER: folder}
        # a session of its own: Ctrl-C comes to this process alone, which hands it on as SIGTERM; no thread has started yet
        command += sys.argv[1:]
        child = subprocess.Popen(command, env=environment, preexec_fn=die_with_parent, start_new_session=True)  # noqa: PLW1509

        def hand_on(*_) -> None:
            terminated.append(True)
            child.terminate()

        for number in SIGNALS:
            signal.signal(number, hand_on)
        status = child.wait()
        failed = [int(file.name) for file in Path(folder).iterdir()]
    return STATUS if terminated else min(failed, default=status)


def adopt(stage: str, paths: RunPaths) -> bool:
    """Tells DVC about the outputs of a stage that DVC did not start.

    Otherwise the next `dvc repro` would delete them and run it again. Returns whether DVC knows them now, or there is no DVC
    here.
    """
    project = paths.lock.parent
    if "DVC_STAGE" in os.environ or not (project / ".dvc").exists():
        return True
    for words in (["repro", "--quiet", "profile"], ["commit", "--quiet", "--force", stage]):
        command = [sys.executable, "-m", "dvc", "--wait-for-lock", *words]
        done = subprocess.run(command, cwd=project, capture_output=True, text=True)
        if done.returncode:
            why = done.stderr.strip().split("\n")[-1]
            print(
                f"DVC does not know this run yet ({why}); before the next dvc repro, run: dvc commit -f {stage}", file=sys.stderr
            )
            return False
    print(f"dvc status knows this run as {stage}")
    return True


def how_to_sample(sampling: SamplingSettings, device: torch.device, **instead: object) -> dict[str, object]:
    """The settings of a Policy from the section `sampling`; instead: values that replace these."""
    size = {"height": sampling.height, "width": sampling.width}
    return {**size, "guidance": sampling.guidance, "dtype": DTYPES[sampling.dtype], "device": device, **instead}


def machine() -> dict[str, object]:
    """What timings depend on: the processor or GPU, and PyTorch's version and threads."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"{platform.machine()}, {os.cpu_count()} CPUs"
    return {"device": device, "threads": torch.get_num_threads(), "torch": torch.__version__}
