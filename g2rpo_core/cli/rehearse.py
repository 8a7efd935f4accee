"""`g2rpo rehearse`: the stages at true size as one of many pretended processes; from the checkout, where the stages are."""

import subprocess
import sys
from argparse import Namespace
from pathlib import Path

from g2rpo_core.errors import UserError


def add_parser(commands) -> None:
    """Adds `rehearse` to the commands of g2rpo; its words are those of `python -m stages.rehearse`."""
    parser = commands.add_parser("rehearse", help="the stages at true size, on GPUs that are pretended", add_help=False)
    parser.set_defaults(run=run, takes_more=True)


def run(args: Namespace) -> None:
    if not Path("stages", "rehearse.py").exists():
        raise UserError("rehearse: run it in the project's checkout, where the folder `stages` is")
    sys.exit(subprocess.run([sys.executable, "-m", "stages.rehearse", *args.more]).returncode)
