"""Treats SIGTERM and SIGINT (Ctrl-C) as requests.

The run stops at its next safe point with a checkpoint, in any case before it is killed.
"""

import os
import signal
import threading
import time

STATUS = 128 + signal.SIGTERM
SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Terminated(Exception):
    """Raised at a safe point: the iteration has not changed the weights."""


class Termination:
    """`requested` is set after SIGTERM or SIGINT; `limit` seconds later the process ends in any case.

    A thread watches for the signals, because a long call holds up Python's own handlers.
    """

    def __init__(self, limit: float = 25.0):
        self.requested, self._limit = False, limit

    def watch(self) -> "Termination":
        """Starts to watch; in the main thread."""
        reading, writing = os.pipe()
        os.set_blocking(writing, False)
        signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
        for number in SIGNALS:
            signal.signal(number, lambda *_: None)
        threading.Thread(target=self._wait, args=(reading,), daemon=True).start()
        return self

    def _wait(self, reading: int) -> None:
        while not set(SIGNALS) & set(os.read(reading, 64)):
            pass
        self.requested = True
        time.sleep(self._limit)
        os._exit(STATUS)  # the previous checkpoint is kept
