"""The command `g2rpo`: what is asked without running the pipeline."""

import argparse
import sys

from g2rpo_core.cli import of_the_checkout, plan, profile, score
from g2rpo_core.errors import UserError


def main() -> None:
    parser = argparse.ArgumentParser(prog="g2rpo", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="command")
    for command in (profile, plan, of_the_checkout, score):
        command.add_parser(commands)
    arguments, more = parser.parse_known_args()
    if more and not getattr(arguments, "takes_more", False):
        parser.error(f"unrecognized arguments: {' '.join(more)}")
    arguments.more = more
    try:
        arguments.run(arguments)
    except UserError as error:
        sys.exit(f"error: {error}")
