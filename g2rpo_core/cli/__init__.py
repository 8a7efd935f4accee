"""Parse the arguments of the command `g2rpo`, and print what it returns."""

from g2rpo_core.cli.main import main

__all__ = ["main"]
