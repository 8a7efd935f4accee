"""Run the command `g2rpo`: the tools around the pipeline.

Exit status: 0 success, 1 an error that one line on stderr explains, 2 wrong usage, 75 a temporary
failure.
"""

import sys

from g2rpo_core.cli.commands import app
from g2rpo_core.foundation.errors import TRANSIENT_STATUS, TransientError, UserError
from g2rpo_core.foundation.files import what_lacks
from g2rpo_core.foundation.texts import echo, show_any_text


def main() -> None:
    """Run the command; an error of the user or the machine becomes one line and an exit status."""
    show_any_text()
    try:
        app()
    except Exception as error:
        line = str(error) if isinstance(error, UserError) else what_lacks(error)
        if line is None:
            raise
        echo(f"error: {line}", file=sys.stderr)
        sys.exit(TRANSIENT_STATUS if isinstance(error, TransientError) else 1)
