"""Run one part of a rehearsal: `python -m pipeline.rehearsal LIBRARY STAGE …`."""

import sys
from pathlib import Path

from pipeline.rehearsal import stub


def main() -> None:
    """Load the library, then torch and the part."""
    stub.load(Path(sys.argv.pop(1)))
    from pipeline.rehearsal import part

    part.main()


if __name__ == "__main__":
    main()
