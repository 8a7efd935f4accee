"""accelerate's launcher with readable errors: `python -m stages.launcher` takes the arguments of `accelerate launch`.

It ends with the status of the process that failed first. That process has printed its own error; one ended by a signal is
reported here.
"""

import sys

from accelerate.commands.launch import launch_command, launch_command_parser
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from g2rpo_core.distributed.termination import STATUS


def main() -> None:
    try:
        launch_command(launch_command_parser().parse_args())
    except SignalException:  # it has ended its processes, which have left their checkpoint
        sys.exit(STATUS)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode < 0:
            why = "; the system does this when memory is short" if failure.exitcode == -9 else ""
            print(
                f"error: process {rank} was ended by signal {-failure.exitcode}{why}: the same command resumes from the last checkpoint",
                file=sys.stderr,
            )
        sys.exit(failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode)


if __name__ == "__main__":
    main()
