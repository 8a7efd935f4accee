"""Commands that start stages from the checkout: `g2rpo rehearse` and `g2rpo launch` pass their arguments to a module."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import typer

from g2rpo_core.errors import UserError

COMMANDS = {  # module, help, and an example of the arguments
    "rehearse": ("stages.rehearse", "Run the stages at true size on simulated GPUs.", "--profile flux_hps --gpus 16 --nodes 2 --memory 141"),
    "launch": ("stages.job", "Write a run as one Slurm job, and submit it on request.", "--profile flux_hps --method g2rpo --seed 1 --nodes 2 --submit"),
}  # fmt: skip
TAKES_ALL = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


def command(name: str, module: str) -> Callable[[typer.Context], None]:
    """A command that passes its arguments, including --help, to `python -m module`."""

    def run(context: typer.Context) -> None:
        if not Path(*module.split(".")).with_suffix(".py").exists():
            raise UserError(f"{name}: run it in the project's checkout, where the folder `stages` is")
        status = subprocess.run([sys.executable, "-m", module, *context.args]).returncode
        if "--help" in context.args:
            print(f"\nExample: g2rpo {name} {COMMANDS[name][2]}")
        sys.exit(status)

    return run
