"""Measure what a flow costs over `dvc repro` when nothing has changed.

Run `python -m flows.benchmark` in an up-to-date checkout. Both are timed from the start of their
process to its end, in turn, against one running Prefect server.
"""

import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from argparse import ArgumentParser
from pathlib import Path

from flows.server import local_server
from g2rpo_core.foundation.texts import echo


def seconds(command: list[str], says: str, environment: dict[str, str]) -> float:
    """Time a command; exit if it fails or does not print `says`, as in an outdated checkout."""
    start = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    taken = time.perf_counter() - start
    if done.returncode or says not in done.stdout + done.stderr:
        sys.exit(
            f"{' '.join(command)}: not up to date, run `dvc repro` first\n"
            f"{done.stdout}{done.stderr}"
        )
    return taken


def main() -> None:
    parser = ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    repeats = parser.parse_args().repeats
    # A server of its own on a free port, so that no other run disturbs the times
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as home:
        os.environ["PREFECT_HOME"] = home
        with local_server(port, Path(home)) as api:
            environment = {**os.environ, "PREFECT_API_URL": api}
            python = sys.executable
            compared = {
                "dvc repro": (
                    [python, "-m", "dvc", "repro"],
                    "Stage 'report' didn't change, skipping",
                ),
                "flow": (
                    [python, "-c", "from flows.pipeline import reproduce; reproduce()"],
                    "0 of",
                ),
            }
            # In turn, so that a slow moment of the machine meets both
            times = {name: [] for name in compared}
            for _ in range(repeats):
                for name, (command, says) in compared.items():
                    times[name].append(seconds(command, says, environment))
    for name, values in times.items():
        echo(
            f"{name}: median {statistics.median(values):.2f} s of {repeats} ({min(values):.2f} to "
            f"{max(values):.2f})"
        )
    echo(
        f"overhead: {statistics.median(times['flow']) - statistics.median(times['dvc repro']):.2f} "
        "s"
    )


if __name__ == "__main__":
    main()
