"""Run DVC's graph, several stages at a time; DVC decides what a stage has to do."""

import math
import os
import queue
import re
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TypeVar

import psutil

from g2rpo_core.foundation.errors import UserError
from g2rpo_core.foundation.files import read_yaml
from g2rpo_core.foundation.progress import FOLLOWED, Bar
from g2rpo_core.foundation.texts import echo
from pipeline.cached import check_kept
from pipeline.graph import Stage
from pipeline.process import GRACE, Ended, Text, run_group

SIDE_BY_SIDE = min(
    4, os.cpu_count() or 1
)  # stages that train small models, each with one thread and about 1.5 GB
BUSY_WAIT = 5.0  # seconds
MARGIN = 5.0  # seconds beyond a profile's grace until SIGKILL
BAR = re.compile(r"\|\s*(\d[\d.]*\w?/\d[\d.]*\w?) \[")  # tqdm's
T = TypeVar("T")


def stop_on_signals() -> threading.Event:
    """Return an event that SIGINT and SIGTERM set from now on."""
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    return stop


def run_graph(
    stages: dict[str, Stage],
    side_by_side: int,
    start: Callable[[Stage, bool, Callable[[], None]], T],
    end: Callable[[str, T], bool],
) -> None:
    """Run stages in order of need, at most `side_by_side` at once, until all have ended.

    start(stage, needs_to_run, done) begins a stage and calls `done` when it ends; needs_to_run: it
    has changed, or one before it ran. end(name, what start returned) says whether the stage ran;
    what it raises is raised here.
    """
    ended: queue.SimpleQueue[str] = queue.SimpleQueue()
    running: dict[str, T] = {}
    over: set[str] = set()
    ran: set[str] = set()
    while len(over) < len(stages):
        # Start what is ready
        for name, stage in stages.items():
            ready = (
                name not in running
                and name not in over
                and all(need in over for need in stage.needs if need in stages)
            )
            if ready and len(running) < side_by_side:
                needs_to_run = stage.changed or any(need in ran for need in stage.needs)
                running[name] = start(stage, needs_to_run, partial(ended.put, name))
        # Wait for the next to end
        name = ended.get()
        if end(name, running.pop(name)):
            ran.add(name)
        over.add(name)


def repro(
    stage: Stage,
    on_text: Callable[[Text], None],
    *,
    stop: threading.Event,
    time_limit: float | None = None,
) -> Ended:
    """Run `dvc repro --single-item` of a stage after other runs that use its files.

    on_text: gets what is printed, also that it has to wait. UserError as `check_kept`.
    """
    check_kept(stage.project, stage.name)
    command = [sys.executable, "-m", "dvc", "--wait-for-lock", "repro", "--single-item", stage.name]
    # A stage's `python` is the one that runs this, and `on_text` follows its bar
    environment = {
        **os.environ,
        FOLLOWED: "1",
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}",
    }
    until = time.monotonic() + (math.inf if time_limit is None else time_limit)
    while True:
        tail: deque[str] = deque(maxlen=20)

        def both(text: Text, tail: deque = tail) -> None:
            tail.append(text.text)
            on_text(text)

        ended = run_group(
            command,
            both,
            stop=stop,
            time_limit=max(until - time.monotonic(), 0.0),
            environment=environment,
            folder=stage.project,
            grace=grace_of(stage.project),
        )
        # DVC waits for its lock, but not for another run that is just making what this stage reads
        # or writes
        busy = any(re.search(r"is busy, it is being blocked by", line) for line in tail)
        if ended.status == 0 or ended.by != "itself" or not busy:
            return ended
        check_blockers([*tail], stage.project)
        stop.wait(BUSY_WAIT)


def check_blockers(lines: list[str], project: Path) -> None:
    """Raise UserError if DVC waits for a process that has ended, whose number another one has.

    DVC frees what a process has locked only where no process has its number; lines: what it says of
    those it waits for, their numbers and commands. Nothing is freed here: the number may be of
    another machine or container that shares the checkout.
    """
    for pid, command in re.findall(r"\(PID (\d+)\): (.*)", "\n".join(lines)):
        with suppress(psutil.Error):  # gone, which DVC sees, or another user's
            process = psutil.Process(int(pid))
            ended = process.status() == psutil.STATUS_ZOMBIE
            words = [] if ended else process.cmdline()
            now, given = " ".join(words), command.rstrip().partition(" ")[2]
            # Or Python that calls DVC, whose first word is another one in the lock
            dvc = "dvc" in (Path(word).name for word in words) or now.endswith(given)
            if ended or (words and not dvc):
                is_now = "has ended" if ended else f"is `{now}` by now"
                raise UserError(
                    f"{project / '.dvc' / 'tmp' / 'rwlock'}: DVC waits for process {pid} "
                    f"(`{command}`), but that {is_now}: if no other machine or container runs DVC "
                    "here, delete this file, and run the same command again"
                )


def grace_of(project: Path) -> float:
    """Return the seconds from SIGTERM to SIGKILL: any method's checkpoint, and a margin."""
    profile = project / "reports" / "profile.yaml"
    if not profile.exists():
        return GRACE
    from g2rpo_core.training.settings import (
        CheckpointSettings,
    )  # late, so that --help does not wait for torch

    resolved = read_yaml(profile)
    sections = [resolved, *(resolved.get("methods") or {}).values()]
    given = [
        ((section or {}).get("training") or {}).get("checkpoints") or {} for section in sections
    ]
    graces = [each.get("grace", CheckpointSettings().grace) for each in given]
    return max(GRACE, max(graces) + MARGIN)


def run_with_bar(
    stages: dict[str, Stage], side_by_side: int, logs: Path, stop: threading.Event
) -> None:
    """Run every stage that has changed or comes after one, under one progress bar.

    logs: the folder for every stage's output. The bar shows how far each running stage is, from
    that stage's own bar. UserError for the first that fails, or for `stop`.
    """
    logs.mkdir(parents=True, exist_ok=True)
    echo(f"{logs.name}: the output of each stage is in {logs}/<stage>.log", file=sys.stderr)
    running: dict[str, str] = {}  # stage -> its name and progress
    with (
        ThreadPoolExecutor(side_by_side) as pool,
        Bar(total=len(stages), unit="stage", desc=logs.name) as bar,
    ):

        def show(name: str, how_far: str) -> None:
            running[name] = f"{name} {how_far}".rstrip()
            bar.set_postfix_str(", ".join(list(running.values())))

        def start(stage: Stage, needs_to_run: bool, done: Callable[[], None]) -> Future | None:
            if not needs_to_run:
                done()
                return None
            show(stage.name, "")
            future = pool.submit(run_logged, stage, logs, stop, partial(show, stage.name))
            future.add_done_callback(lambda _: done())
            return future

        def end(name: str, future: Future | None) -> bool:
            running.pop(name, None)
            bar.update()
            bar.set_postfix_str(", ".join(list(running.values())))
            if future:
                future.result()
            return future is not None

        try:
            run_graph(stages, side_by_side, start, end)
        except BaseException:
            # End the others, which leave their checkpoints
            stop.set()
            raise


def run_logged(
    stage: Stage,
    logs: Path,
    stop: threading.Event,
    on_bar: Callable[[str], None] = lambda how_far: None,
) -> None:
    """Run one stage with its output in a file in `logs`; UserError with its last error if it fails.

    on_bar: called with `12/200` when the stage's own bar has moved.
    """
    log = logs / f"{stage.name}.log"
    errors: list[str] = []
    with log.open("w", encoding="utf-8") as file:

        def write(text: Text) -> None:
            file.write(f"{text.text}\n")
            file.flush()
            if bar := BAR.search(text.text):
                on_bar(bar[1])
            if text.text.startswith("error: "):
                errors.append(text.text.removeprefix("error: "))

        ended = repro(stage, write, stop=stop)
    if ended.by == "stop":
        raise UserError(f"{stage.name}: stopped; the same command resumes it")
    if ended.status:
        raise UserError(
            f"{stage.name}: {errors[-1] if errors else f'exit status {ended.status}'}; "
            f"its output is in {log}"
        )
