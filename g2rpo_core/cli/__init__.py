"""The command `g2rpo`: parsing and printing alone."""

from g2rpo_core.cli.main import main

__all__ = ["main"]
