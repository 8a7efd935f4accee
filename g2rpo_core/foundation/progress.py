"""Progress bars: redrawn on a terminal; elsewhere, as in a log, a line now and then."""

import os
import sys
import time
from collections.abc import Iterable
from contextlib import suppress

from tqdm import tqdm

# Environment variable of a process whose reader, such as a flow, follows redrawn bars
FOLLOWED = "G2RPO_BARS_ARE_FOLLOWED"
EVERY = 60.0  # seconds between two lines of a bar


class Bar(tqdm):
    """A bar of tqdm that prints lines where nobody sees it redrawn: every minute, and the last."""

    def __init__(self, iterable: Iterable | None = None, **options):
        self.lines = not (FOLLOWED in os.environ or sys.stderr.isatty())
        self.due = time.monotonic() + EVERY
        super().__init__(iterable, file=sys.stderr, mininterval=2, **options)

    def display(self, msg: str | None = None, pos: int | None = None) -> bool:
        """Draw the bar, or print it as a line if one is due."""
        if not self.lines:
            return super().display(msg, pos)
        if time.monotonic() < self.due:
            return False
        self._line()
        return True

    def clear(self, nolock: bool = False) -> None:
        """Clear the bar on a terminal: lines stay."""
        if not self.lines:
            super().clear(nolock=nolock)

    def close(self) -> None:
        """End the bar, with its last line."""
        if self.lines and not self.disable:
            self.sp, self._ema_dt = None, lambda: None  # nothing more is drawn; the rate is overall
            self._line()
        super().close()

    def __del__(self) -> None:
        # A signal may end __init__ before all of it is there
        with suppress(AttributeError):
            super().__del__()

    def _line(self) -> None:
        self.due = time.monotonic() + EVERY
        self.fp.write(f"{self}\n")
        self.fp.flush()
