"""Show the jobs that `g2rpo launch` submitted from this folder: number, state, end of the log."""

import argparse
import subprocess
from pathlib import Path

from g2rpo_core.foundation.errors import UserError
from g2rpo_core.foundation.manifest import read_sealed
from g2rpo_core.foundation.texts import echo, reason, visible
from stages.entry import ends_in_one_line

JOBS = Path(".cache", "jobs")
SUBMITTED = JOBS / "submitted.json"  # job -> the number that Slurm gave it


@ends_in_one_line
def main() -> None:
    argparse.ArgumentParser(prog="g2rpo jobs", description=__doc__).parse_args()
    numbers = submitted()
    if not numbers:
        raise UserError("jobs: none was submitted from this folder: g2rpo launch --submit")
    states = queued()
    for name, number in numbers.items():
        log = JOBS / f"{name}.log"
        lines = (
            log.read_text(errors="replace").replace("\r", "\n").split("\n") if log.exists() else []
        )
        last = next((line.strip() for line in reversed(lines) if line.strip()), "")
        echo(f"{name:30} {number:>8}  {states.get(number, 'ended'):24} {visible(last)[:100]}")


def submitted() -> dict[str, str]:
    """Return job -> the number of its last submission from this folder."""
    return read_sealed(SUBMITTED) if SUBMITTED.exists() else {}


def queued() -> dict[str, str]:
    """Return the user's queued jobs as number -> state and reason; UserError without Slurm."""
    try:
        done = subprocess.run(
            ["squeue", "--me", "--noheader", "--format=%i %T %r"], capture_output=True, text=True
        )
    except FileNotFoundError:
        raise UserError("there is no squeue on this machine: go to one of the cluster") from None
    if done.returncode:
        raise UserError(f"squeue: {reason(done.stderr)}")
    lines = [line.split(maxsplit=2) for line in done.stdout.splitlines()]
    return {
        number: state.lower() + (f" ({why})" if why != "None" else "")
        for number, state, why in lines
    }


if __name__ == "__main__":
    main()
