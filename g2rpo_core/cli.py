"""The command `g2rpo`: what is asked without running the pipeline."""

import argparse
import sys

from . import plan, score
from .errors import UserError


def main() -> None:
    parser = argparse.ArgumentParser(prog="g2rpo", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="command")
    plan.add_parser(commands)
    score.add_parser(commands)
    arguments = parser.parse_args()
    try:
        arguments.run(arguments)
    except UserError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
