"""Commands that start stages, from the checkout: `g2rpo rehearse` and `g2rpo launch` take the words of the module that they run."""

import subprocess
import sys
from argparse import Namespace
from pathlib import Path

from g2rpo_core.errors import UserError

COMMANDS = {  # its module and its help
    "rehearse": ("stages.rehearse", "the stages at true size, on GPUs that are pretended"),
    "launch": ("stages.job", "a run as one job of a Slurm cluster"),
}


def add_parser(commands) -> None:
    """Adds them to the commands of g2rpo."""
    for name, (module, about) in COMMANDS.items():
        parser = commands.add_parser(name, help=about, add_help=False)
        parser.set_defaults(run=run, takes_more=True, command=name, module=module)


def run(args: Namespace) -> None:
    if not Path(*args.module.split(".")).with_suffix(".py").exists():
        raise UserError(f"{args.command}: run it in the project's checkout, where the folder `stages` is")
    sys.exit(subprocess.run([sys.executable, "-m", args.module, *args.more]).returncode)
