"""The flows: `reproduce`, `train`, `evaluate`, `report`. Each asks DVC what there is to do, and runs one task a stage."""

import os
import queue
import threading
import time
from collections.abc import Callable
from pathlib import Path

from prefect import flow
from prefect.futures import PrefectFuture
from prefect.logging import get_run_logger
from prefect.settings import PREFECT_API_URL
from prefect.states import Completed, Failed, State
from prefect.task_runners import ThreadPoolTaskRunner
from rich.console import Console

from g2rpo_core.errors import UserError

from .artifacts import publish
from .graph import Stage, chosen, read_graph
from .server import healthy
from .stage import stage_task

# A runner that has died no longer reads what its run prints, for which rich would end the run.
Console.on_broken_pipe = lambda console: setattr(console, "quiet", True)

SIDE_BY_SIDE = 2
AWAY_WAIT = 5.0  # seconds


@flow(task_runner=ThreadPoolTaskRunner(), persist_result=False)
def reproduce(targets: list[str] | None = None, side_by_side: int = SIDE_BY_SIDE) -> State:
    """Every stage, or the targets and all that they need: what `dvc repro` does."""
    return run_chosen(lambda stages: chosen(stages, targets or []), side_by_side)


@flow(task_runner=ThreadPoolTaskRunner(), persist_result=False)
def train(runs: list[str] | None = None, side_by_side: int = SIDE_BY_SIDE) -> State:
    """The named runs (`g2rpo-1`), or all of them, and what they need."""
    return run_chosen(lambda stages: chosen(stages, [f"train@{run}" for run in runs or []] or ["train"]), side_by_side)


@flow(task_runner=ThreadPoolTaskRunner(), persist_result=False)
def evaluate(side_by_side: int = SIDE_BY_SIDE) -> State:
    """The base model and every trained run that have no scores yet; trains nothing."""
    return run_chosen(unscored, side_by_side)


@flow(task_runner=ThreadPoolTaskRunner(), persist_result=False)
def report() -> State:
    """The report alone, from the runs and scores that are there."""
    return run_chosen(lambda stages: {name: stage for name, stage in stages.items() if stage.group == "report"}, 1)


def unscored(stages: dict[str, Stage]) -> dict[str, Stage]:
    """The stages `evaluate…` whose training (and all else that they need) is up to date; logs the others."""
    found = {}
    for name, stage in stages.items():
        if not stage.group.startswith("evaluate"):
            continue
        if unmade := [need for need in stage.needs if stages[need].changed]:
            get_run_logger().info("%s: left out, as %s is not up to date", name, ", ".join(unmade))
        else:
            found[name] = stage
    return found


def run_chosen(choose: Callable[[dict[str, Stage]], dict[str, Stage]], side_by_side: int) -> State:
    """Runs what `choose` takes of the graph as it is now; what the user can mend ends in one line."""
    try:
        return run_stages(choose(read_graph()), side_by_side)
    except UserError as error:
        return Failed(message=str(error))


def run_stages(stages: dict[str, Stage], side_by_side: int) -> State:
    """Runs each stage after those it needs, at most `side_by_side` at once, and returns the state of the whole.

    A stage after a failed one does not run; independent ones do. SIGTERM (a cancelled run) ends the process groups of all
    running stages and comes back as what Prefect raises for it.
    """
    stop, done = threading.Event(), queue.SimpleQueue()
    futures: dict[str, PrefectFuture] = {}
    running: set[str] = set()
    ended: dict[str, State] = {}
    ran: set[str] = set()

    def submit(stage: Stage) -> None:
        wait_for_server(stop)
        needs_to_run = stage.changed or any(need in ran for need in stage.needs)
        needs = [futures[need] for need in stage.needs if need in futures]
        future = stage_task(stage, stop).submit(needs_to_run, wait_for=needs)
        futures[stage.name] = future
        running.add(stage.name)
        future.add_done_callback(lambda _: done.put(stage.name))

    try:
        while len(ended) < len(stages):
            for name, stage in stages.items():
                ready = name not in futures and all(need in ended for need in stage.needs if need in stages)
                if ready and len(running) < side_by_side:
                    submit(stage)
            name = done.get()
            running.remove(name)
            futures[name].wait()  # before it, its state is what the server knows, which is older
            ended[name] = futures[name].state
            if ended[name].is_completed() and ended[name].name != "Skipped":
                ran.add(name)
    except BaseException:
        stop.set()
        for name in running:
            futures[name].wait()
        raise
    wait_for_server(stop)
    publish(Path("."), stages)
    return outcome(ended)


def outcome(ended: dict[str, State]) -> State:
    """The state of a flow run from those of its stages: what failed and how, and what did not run after it."""
    failed = [state.message for state in ended.values() if state.is_failed() or state.is_crashed() or state.is_cancelled()]
    unstarted = [name for name, state in ended.items() if state.is_pending()]
    if failed:
        after = f"; not run after it: {', '.join(unstarted)}" if unstarted else ""
        return Failed(message=f"{'; '.join(map(str, failed))}{after}")
    names = [state.name for state in ended.values()]
    skipped = names.count("Skipped")
    return Completed(message=f"{len(names) - skipped} of {len(names)} stages ran or were restored, {skipped} skipped")


def wait_for_server(stop: threading.Event) -> None:
    """Returns at once while the Prefect server answers, else when it does again: a run outlives its server."""
    api = PREFECT_API_URL.value() or os.environ.get("PREFECT_API_URL")
    if not api or healthy(api):  # without an address, Prefect runs a server inside this process
        return
    get_run_logger().warning("the Prefect server does not answer: waiting for it")
    started = time.monotonic()
    while not healthy(api) and not stop.is_set():
        time.sleep(AWAY_WAIT)
    get_run_logger().info("the Prefect server was away for %.0f s", time.monotonic() - started)
