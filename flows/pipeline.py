"""The flows `reproduce`, `train`, `evaluate` and `report`: a task for each stage that DVC names."""

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

from prefect import flow
from prefect.futures import PrefectFuture
from prefect.logging import get_run_logger
from prefect.settings import PREFECT_API_URL
from prefect.states import Completed, Failed, State
from prefect.task_runners import ThreadPoolTaskRunner
from pydantic import Field
from rich.console import Console

from flows.artifacts import publish
from flows.server import answers
from flows.stage import stage_task
from g2rpo_core.foundation.errors import UserError
from pipeline.graph import Stage, chosen, read_graph
from pipeline.runner import run_graph

# A dead runner no longer reads its run's output; rich would then end the run.
Console.on_broken_pipe = lambda console: setattr(console, "quiet", True)

SIDE_BY_SIDE = 2
Count = Annotated[int, Field(ge=1)]  # Prefect refuses others before a run
AWAY_WAIT = 5.0  # seconds


@flow(task_runner=ThreadPoolTaskRunner(), persist_result=False)
def reproduce(targets: list[str] | None = None, side_by_side: Count = SIDE_BY_SIDE) -> State:
    """Run every stage, or the targets and all that they need, as `dvc repro` does."""
    return run_chosen(lambda stages: chosen(stages, targets or []), side_by_side)


@flow(task_runner=ThreadPoolTaskRunner(), persist_result=False)
def train(runs: list[str] | None = None, side_by_side: Count = SIDE_BY_SIDE) -> State:
    """Train the named runs (`g2rpo-1`), or all of them, after what they need."""
    return run_chosen(
        lambda stages: chosen(stages, [f"train@{run}" for run in runs or []] or ["train"]),
        side_by_side,
    )


@flow(task_runner=ThreadPoolTaskRunner(), persist_result=False)
def evaluate(side_by_side: Count = SIDE_BY_SIDE) -> State:
    """Score the base model and every trained run that have no scores yet; train nothing."""
    return run_chosen(unscored, side_by_side)


@flow(task_runner=ThreadPoolTaskRunner(), persist_result=False)
def report() -> State:
    """Write the report alone, from the runs and scores that exist."""
    return run_chosen(
        lambda stages: {name: stage for name, stage in stages.items() if stage.group == "report"}, 1
    )


def unscored(stages: dict[str, Stage]) -> dict[str, Stage]:
    """Return the stages `evaluate…` whose needs are up to date; log the others."""
    ready = {}
    for name, stage in stages.items():
        if not stage.group.startswith("evaluate"):
            continue
        if unmade := [need for need in stage.needs if stages[need].changed]:
            get_run_logger().info(
                "%s: left out, because %s is not up to date", name, ", ".join(unmade)
            )
        else:
            ready[name] = stage
    return ready


def run_chosen(choose: Callable[[dict[str, Stage]], dict[str, Stage]], side_by_side: int) -> State:
    """Run the stages of the graph that `choose` returns; a UserError becomes one line."""
    try:
        stages = read_graph()
        # seconds; only after them it is known what else has changed
        first = {name: stages[name] for name in ("code", "profile") if name in stages}
        if any(stage.changed for stage in first.values()):
            state = run_stages(first, 1)
            if not state.is_completed():
                return state
            stages = read_graph()
        return run_stages(choose(stages), side_by_side)
    except UserError as error:
        return Failed(message=str(error))


def run_stages(stages: dict[str, Stage], side_by_side: int) -> State:
    """Run each stage after those it needs, at most `side_by_side` at once; return the end state.

    A stage after a failed one does not run; independent ones do. SIGTERM (a cancelled run) ends the
    process groups of all running stages; then Prefect's own exception is raised.
    """
    stop = threading.Event()
    futures: dict[str, PrefectFuture] = {}
    running: set[str] = set()
    ended: dict[str, State] = {}

    def start(stage: Stage, needs_to_run: bool, done: Callable[[], None]) -> PrefectFuture:
        wait_for_server(stop)
        needs = [futures[need] for need in stage.needs if need in futures]
        future = futures[stage.name] = stage_task(stage, stop).submit(needs_to_run, wait_for=needs)
        running.add(stage.name)
        future.add_done_callback(lambda _: done())
        return future

    def end(name: str, future: PrefectFuture) -> bool:
        running.remove(name)
        # until then, its state is that of the server, which is older
        future.wait()
        ended[name] = future.state
        return future.state.is_completed() and future.state.name != "Skipped"

    try:
        run_graph(stages, side_by_side, start, end)
    except BaseException:
        stop.set()
        for name in running:
            futures[name].wait()
        raise
    wait_for_server(stop)
    publish(Path("."), stages)
    return outcome(ended)


def outcome(ended: dict[str, State]) -> State:
    """Return a flow run's state from its stages': which failed and how, and which did not run."""
    failed = [
        state.message
        for state in ended.values()
        if state.is_failed() or state.is_crashed() or state.is_cancelled()
    ]
    unstarted = [name for name, state in ended.items() if state.is_pending()]
    if failed:
        after = f"; not run after it: {', '.join(unstarted)}" if unstarted else ""
        return Failed(message=f"{'; '.join(map(str, failed))}{after}")
    names = [state.name for state in ended.values()]
    skipped = names.count("Skipped")
    return Completed(
        message=(
            f"{len(names) - skipped} of {len(names)} stages ran or were restored, {skipped} skipped"
        )
    )


def wait_for_server(stop: threading.Event) -> None:
    """Return once the Prefect server answers, so that a run outlives its server."""
    api = PREFECT_API_URL.value() or os.environ.get("PREFECT_API_URL")
    # without an address, Prefect runs a server inside this process
    if not api or answers(api):
        return
    get_run_logger().warning("the Prefect server does not answer: waiting for it")
    started = time.monotonic()
    while not answers(api) and not stop.is_set():
        time.sleep(AWAY_WAIT)
    get_run_logger().info("the Prefect server was away for %.0f s", time.monotonic() - started)
