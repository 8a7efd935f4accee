"""Run a command in its own process group, pass on its output, and end the whole group."""

import codecs
import math
import os
import re
import selectors
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextvars import copy_context
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Literal

import psutil

from g2rpo_core.foundation.texts import visible

# Seconds from SIGTERM to SIGKILL for what gives no longer ones: training stops at its next call of
# the transformer, and writes a checkpoint
GRACE = 12.0
POLL = 0.25  # seconds
CURSOR = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")


@dataclass(frozen=True)
class Text:
    """A line of output, or one redrawing of a progress bar, which a carriage return ends."""

    text: str
    redrawn: bool


By = Literal["itself", "time limit", "stop"]


@dataclass(frozen=True)
class Ended:
    """How a process group ended."""

    status: int
    """The leader's exit status."""
    by: By
    """Whether it ended by itself, or was ended."""


class Lines:
    """Splits bytes as they come into lines and redrawings; empty ones are left out."""

    def __init__(self):
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        self._rest = ""

    def feed(self, data: bytes, *, final: bool = False) -> Iterator[Text]:
        self._rest += self._decode(data, final)
        # A carriage return at the end is kept: a newline may follow and make one line end of both
        pattern = r"([^\r\n]*)(\r\n|\n|\r|\Z)" if final else r"([^\r\n]*)(\r\n|\n|\r(?=[^\n]))"
        end = 0
        for match in re.finditer(pattern, self._rest):
            end = match.end()
            # Progress bars move the cursor; no other text of a stage may control a terminal
            if text := visible(CURSOR.sub("", match[1])).rstrip():
                yield Text(text, redrawn=match[2] == "\r")
        self._rest = self._rest[end:]


def run_group(
    command: Sequence[str],
    on_text: Callable[[Text], None],
    *,
    stop: threading.Event,
    time_limit: float | None = None,
    environment: Mapping[str, str] | None = None,
    folder: Path | None = None,
    grace: float = GRACE,
) -> Ended:
    """Run `command` in a folder (the working directory) and return when its whole group is gone.

    Nothing it started stays behind. When `stop` is set or `time_limit` seconds have passed, the
    group gets SIGTERM, and SIGKILL after `grace` seconds. stdout and stderr go to `on_text`
    together, from another thread; what it raises is raised here.
    """
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=environment,
        cwd=folder,
        start_new_session=True,
    )
    assert process.stdout
    until = time.monotonic() + (math.inf if time_limit is None else time_limit)
    by: By = "itself"
    over = threading.Event()
    # Pass on the output in a thread with this one's context: a callback that hangs must not keep
    # the group from being ended
    with process.stdout as output, ThreadPoolExecutor(1) as pool:
        passed = pool.submit(copy_context().run, _pass_on, output, on_text, over)
        try:
            while by == "itself" and process.poll() is None:
                time.sleep(POLL) if passed.done() else wait([passed], POLL)
                if passed.done():
                    passed.result()
                if stop.is_set():
                    by = "stop"
                elif time.monotonic() > until:
                    by = "time limit"
        finally:
            # Also what a leader that ended itself left running; after an exception, too, SIGTERM
            # comes first, so that a checkpoint is written
            _end(process.pid, grace)
            over.set()
            process.wait()
        passed.result()
    return Ended(process.wait(), by)


def _pass_on(output: IO[bytes], on_text: Callable[[Text], None], over: threading.Event) -> None:
    """Pass on output until it ends, or until nothing more comes after `over` is set."""
    lines = Lines()
    with selectors.DefaultSelector() as selector:
        selector.register(output, selectors.EVENT_READ)
        while True:
            last = over.is_set()
            if not selector.select(POLL):
                if last:
                    return
                continue
            data = os.read(output.fileno(), 1 << 16)
            for text in lines.feed(data, final=not data):
                on_text(text)
            if not data:
                return


def _signal(group: int, number: signal.Signals) -> None:
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        pass


def _end(group: int, grace: float) -> None:
    _signal(group, signal.SIGTERM)
    until = time.monotonic() + grace
    while _alive(group):
        if time.monotonic() > until:
            _signal(group, signal.SIGKILL)
        time.sleep(POLL)


def _alive(group: int) -> bool:
    """Tell whether any process of the group still runs; zombies do not count."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    for process in psutil.process_iter(["status"]):
        try:
            if os.getpgid(process.pid) == group and process.info["status"] != psutil.STATUS_ZOMBIE:
                return True
        except ProcessLookupError:
            continue
    return False
