"""Runs one DVC stage as one Prefect task."""

import re
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from uuid import UUID

from prefect import Task, task
from prefect.artifacts import (
    create_markdown_artifact,
    create_progress_artifact,
    update_progress_artifact,
)
from prefect.cache_policies import NO_CACHE
from prefect.logging import get_run_logger
from prefect.states import Cancelled, Completed, Failed, State
from prefect.tasks import exponential_backoff

from flows.artifacts import artifact_key, at_most_a_warning
from g2rpo_core.foundation.errors import TRANSIENT_STATUS
from pipeline.graph import Stage
from pipeline.process import Ended, Text
from pipeline.runner import repro

BAR = re.compile(r"(\d{1,3})%\|")  # tqdm's
BAR_EVERY = 30.0  # seconds
LAST_LINES = 40
TRANSIENT = "TryAgain"  # the state's name after a temporary failure


@dataclass
class Output:
    """Callback for a stage's output: to Prefect's log, and its progress bar to an artifact, too.

    A bar is passed on every BAR_EVERY seconds.
    """

    stage: str
    tail: deque = field(default_factory=lambda: deque(maxlen=LAST_LINES))
    bar_due: float = 0.0
    artifact: UUID | None = None
    failed: set[type] = field(default_factory=set)

    def __call__(self, text: Text) -> None:
        if not text.redrawn:
            self.tail.append(text.text)
        elif time.monotonic() < self.bar_due:
            return
        else:
            self.bar_due = time.monotonic() + BAR_EVERY
        if bar := BAR.search(text.text):
            self.show(float(bar[1]), text.text.strip())
        get_run_logger().info("%s", text.text)

    def show(self, percent: float, line: str) -> None:
        """Update the progress artifact to `percent`; failures are skipped."""
        with at_most_a_warning("no progress shown", self.failed):
            if self.artifact is None:
                self.artifact = create_progress_artifact(
                    percent, artifact_key("progress", self.stage), line
                )
            else:
                update_progress_artifact(self.artifact, percent, line)

    def says(self, pattern: str) -> re.Match | None:
        """Return the last match among the last lines."""
        return next(
            (match for line in reversed(self.tail) if (match := re.search(pattern, line))), None
        )


def stage_task(stage: Stage, stop: threading.Event) -> Task:
    """Return the task of a stage.

    Its run ends Completed, Skipped or Restored (DVC had nothing to run), Failed, or Cancelled by
    `stop`.
    """
    meta = stage.meta

    @task(
        name=stage.group,
        task_run_name=stage.name,
        tags=list(meta.tags),
        retries=meta.retries,
        retry_delay_seconds=exponential_backoff(meta.retry_delay) if meta.retries else None,
        retry_condition_fn=lambda task, run, state: state.name == TRANSIENT,
        cache_policy=NO_CACHE,
        persist_result=False,
    )
    def run(needs_to_run: bool) -> State:
        if not needs_to_run:
            return Completed(name="Skipped", message="unchanged, as is everything before it")
        return reproduce_stage(stage, stop)

    return run


def reproduce_stage(stage: Stage, stop: threading.Event) -> State:
    """Run `dvc repro --single-item` of a stage, and return the state that says how it ended."""
    output = Output(stage.name)
    ended = repro(stage, output, stop=stop, time_limit=stage.meta.time_limit)
    return make_state(stage, ended, output)


def make_state(stage: Stage, ended: Ended, output: Output) -> State:
    """Return a stage's end as a Prefect state; a failure's last lines become an artifact."""
    if ended.by == "stop":
        message = "its process group was ended; training resumes from its checkpoint the next time"
        return Cancelled(message=message)
    # Success: DVC says whether it ran the stage
    if ended.by == "itself" and ended.status == 0:
        if output.says(r"^Stage '.*' didn't change, skipping"):
            return Completed(name="Skipped", message="DVC: nothing changed")
        if output.says(r"^Stage '.*' is cached - skipping run"):
            return Completed(
                name="Restored",
                message="DVC had run it before with the same inputs: outputs taken from its cache",
            )
        return Completed()
    # DVC's own is always 255
    status = int(exited[1]) if (exited := output.says(r"exited with (-?\d+)")) else ended.status
    what = (
        f"over its time limit of {stage.meta.time_limit:g} s"
        if ended.by == "time limit"
        else f"exit status {status}"
    )
    last = "\n".join(output.tail)
    with at_most_a_warning("the last lines could not be kept as an artifact", set()):
        create_markdown_artifact(
            f"## {stage.name}: {what}\n\n```\n{last}\n```\n",
            artifact_key("failure", stage.name),
            f"last lines of {stage.name}",
        )
    passing = ended.by == "itself" and status == TRANSIENT_STATUS
    return Failed(name=TRANSIENT if passing else "Failed", message=f"{stage.name}: {what}")
