"""Make a flow run's artifacts at its end: a table of results and a link to the report.

The stages know nothing of Prefect: everything is read from the files that they write.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from prefect.artifacts import create_link_artifact, create_table_artifact
from prefect.logging import get_run_logger

from g2rpo_core.foundation.tables import read_numbers
from g2rpo_core.foundation.texts import natural, visible
from pipeline.graph import Stage


def publish(root: Path, stages: dict[str, Stage]) -> None:
    """Add artifacts of what `stages` make and exists to the calling flow run."""
    groups = {stage.group for stage in stages.values()}
    with at_most_a_warning("an artifact could not be made or sent", set()):
        if table := results(root):
            create_table_artifact(
                table, "results", "mean rewards on the test prompts, from reports/metrics"
            )
        if (page := root / "reports" / "report.html").exists() and "report" in groups:
            create_link_artifact(
                page.resolve().as_uri(),
                "report.html",
                "report",
                "the report, on the machine that made it",
            )


@contextmanager
def at_most_a_warning(what: str, said: set[type]) -> Iterator[None]:
    """Log an error of the block in one line, the first of its kind only, and go on.

    Nothing that is only displayed may end a run. said: the kinds that were logged before.
    """
    try:
        yield
    except Exception as error:  # noqa: BLE001
        if type(error) not in said:
            said.add(type(error))
            get_run_logger().warning(
                "%s: %s", what, visible(f"{type(error).__name__}: {error}")[:300]
            )


def results(root: Path) -> list[dict]:
    """Return one row per model: its name and its mean rewards."""
    return [
        {"model": file.stem} | {name: round(value, 4) for name, value in read_numbers(file).items()}
        for file in sorted(
            (root / "reports" / "metrics").glob("*.json"), key=lambda path: natural(path.name)
        )
    ]


def artifact_key(*words: str) -> str:
    """Return an artifact's key: lower-case letters, digits and dashes."""
    return re.sub(r"[^a-z0-9]+", "-", " ".join(words).lower()).strip("-")
