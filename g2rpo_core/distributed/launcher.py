"""Starts the processes of a stage by accelerate's launcher, and ends them at a safe point.

As `python -m g2rpo_core.distributed.launcher` it is `accelerate launch`, or after the word
`torchrun` that, with readable errors. It ends with the status of the process that failed first.
That process has printed its own error; one ended by a signal is reported here.
"""

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from functools import partial
from pathlib import Path

import torch

from g2rpo_core.distributed.process_group import Processes, ProcessGroup, join, num_processes
from g2rpo_core.foundation.errors import STATUS_FOLDER, TRANSIENT_STATUS, UserError
from g2rpo_core.foundation.texts import echo
from g2rpo_core.numerics.parent import LAUNCHER, die_with_parent

STATUS = 128 + signal.SIGTERM
SIGNALS = (signal.SIGTERM, signal.SIGINT)
CONFIGURATIONS = Path(__file__).parent / "accelerate"
# the environment variable with the seconds that torch's launcher leaves its processes after
# SIGTERM, before it kills them
SHUTDOWN = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
SHUTDOWN_DEFAULT = 30
MARGIN = 15  # seconds that it leaves them beyond their own limit


class Terminated(Exception):
    """Raised at a safe point: the iteration has not changed the weights."""


class Termination:
    """Watches for SIGTERM and SIGINT: sets `requested`, and ends the process after `limit` seconds.

    A thread watches for the signals, because a long call holds up Python's own handlers.
    """

    def __init__(self, limit: float = 25.0):
        self.requested, self._limit = False, limit

    def watch(self) -> "Termination":
        """Start to watch; in the main thread."""
        reading, writing = os.pipe()
        os.set_blocking(writing, False)
        signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
        for number in SIGNALS:
            signal.signal(number, lambda *_: None)
        threading.Thread(target=self._wait, args=(reading,), daemon=True).start()
        return self

    def _wait(self, reading: int) -> None:
        while not set(SIGNALS) & set(os.read(reading, 64)):
            pass
        self.requested = True
        time.sleep(self._limit)
        # The previous checkpoint is complete
        os._exit(STATUS)


def join_processes(
    asked: Processes, items: int | None = None, grace: float = 0.0
) -> tuple[ProcessGroup, torch.device]:
    """Return this process's group and device among the requested processes.

    If more than one is requested and none has been started, `accelerate launch` runs the same
    command on this machine, and this process ends with its status. accelerate or torchrun may also
    be started by hand, on one or several machines. items: see `num_processes`; grace: seconds that
    the processes need after SIGTERM; UserError if their launcher leaves them less.
    """
    if "WORLD_SIZE" not in os.environ:
        count, gpus = num_processes(asked, items), torch.cuda.device_count()
        if asked == "auto" and count < gpus:
            echo(
                f"processes: auto: {count} of {gpus} GPUs, "
                f"as {items} prompts per iteration are shared evenly",
                file=sys.stderr,
            )
        if count > 1:
            sys.exit(_launch(count, grace))
    _end_if_useless()
    left = float(os.environ.get(SHUTDOWN, SHUTDOWN_DEFAULT))
    if "TORCHELASTIC_RUN_ID" in os.environ and grace > left:
        raise UserError(
            f"training.checkpoints.grace is {grace:g} s, "
            f"but the launcher kills its processes {left:g} s after SIGTERM: "
            f"export {SHUTDOWN}={round(grace) + MARGIN} before it starts"
        )
    return join(asked, items)


def _end_if_useless() -> None:
    """End a process restarted after an error that only the user can fix, with its status."""
    if int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) and STATUS_FOLDER in os.environ:
        failed = statuses(Path(os.environ[STATUS_FOLDER]))
        if failed - {TRANSIENT_STATUS}:
            sys.exit(min(failed))


def statuses(folder: Path) -> set[int]:
    """Return the exit statuses that processes have left in STATUS_FOLDER."""
    return {int(file.name) for file in folder.glob("[0-9]*")}


def _launch(count: int, grace: float) -> int:
    spec = sys.modules["__main__"].__spec__
    module = spec.name if spec else ""
    options = [
        "--config_file",
        str(CONFIGURATIONS / "eight_gpus.yaml"),
        "--num_processes",
        str(count),
    ]
    command = [sys.executable, "-m", "g2rpo_core.distributed.launcher", *options, "-m", module]
    terminated = []
    # accelerate's own status is 1, whatever the status of a process
    with tempfile.TemporaryDirectory() as folder:
        seconds = max(SHUTDOWN_DEFAULT, round(grace) + MARGIN)
        environment = {SHUTDOWN: str(seconds), **os.environ, STATUS_FOLDER: folder}
        # A session of its own: Ctrl-C comes to this process alone, which hands it on as SIGTERM; no
        # thread has started yet
        command += sys.argv[1:]
        follow = partial(die_with_parent, os.getpid())
        child = subprocess.Popen(
            command,
            env=environment,
            preexec_fn=follow,  # noqa: PLW1509
            start_new_session=True,
        )

        def pass_on(*_) -> None:
            terminated.append(True)
            child.terminate()

        for number in SIGNALS:
            signal.signal(number, pass_on)
        status = child.wait()
        failed = statuses(Path(folder))
    return STATUS if terminated else min(failed, default=status)


def main() -> None:
    from accelerate.commands.launch import launch_command, launch_command_parser
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as torchrun

    os.environ[LAUNCHER] = str(os.getpid())
    try:
        if sys.argv[1:2] == ["torchrun"]:
            torchrun(sys.argv[2:])
        else:
            launch_command(launch_command_parser().parse_args())
    except SignalException:  # it has ended its processes, which have left their checkpoint
        sys.exit(STATUS)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode < 0:
            why = "; the system does this when memory is short" if failure.exitcode == -9 else ""
            echo(
                f"error: process {rank} was ended by signal {-failure.exitcode}{why}: "
                "the same command resumes from the last checkpoint",
                file=sys.stderr,
            )
        failed = statuses(Path(os.environ[STATUS_FOLDER])) if STATUS_FOLDER in os.environ else set()
        sys.exit(
            min(
                failed, default=failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode
            )
        )


if __name__ == "__main__":
    main()
