"""Make a flow run's artifacts at its end: results, report, curves and images.

The stages know nothing of Prefect: everything is read from the files that they write.
"""

import base64
import io
import math
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from PIL import Image
from prefect.artifacts import create_image_artifact, create_link_artifact, create_table_artifact
from prefect.logging import get_run_logger

from g2rpo_core.foundation.files import read_json, reading
from g2rpo_core.foundation.profiles import read_chain
from g2rpo_core.foundation.runs import HELDOUT_CURVE
from g2rpo_core.foundation.tables import read_numbers
from g2rpo_core.foundation.texts import natural, visible
from pipeline.graph import Stage

GRID_PROMPTS = 6
GRID_PIXELS = 128  # of one image's side


def publish(root: Path, stages: dict[str, Stage]) -> None:
    """Add artifacts of what `stages` make and exists to the calling flow run."""
    groups = {stage.group for stage in stages.values()}
    runs = sorted(
        (stage.name.split("@")[1] for stage in stages.values() if "@" in stage.name), key=natural
    )
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
        # Not by g2rpo_core.config, which loads torch
        profile = read_chain(Path("params.yaml")).data["profile"]
        if curve := reward_curve(root / "runs" / profile, runs):
            create_image_artifact(
                curve, "reward-curve", "mean rewards on held-out prompts during training"
            )
        if grid := image_grid(root, runs):
            create_image_artifact(grid, "grid", "the first test prompts; a row is a model")


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


def by_name(paths: Iterable[Path]) -> list[Path]:
    """Return paths by their names in natural order."""
    return sorted(paths, key=lambda path: natural(path.name))


def results(root: Path) -> list[dict]:
    """Return one row per model: its name and its mean rewards."""
    return [
        {"model": file.stem} | {name: round(value, 4) for name, value in read_numbers(file).items()}
        for file in by_name((root / "reports" / "metrics").glob("*.json"))
    ]


def reward_curve(folder: Path, runs: list[str]) -> str | None:
    """Draw the held-out rewards of a folder's runs by iteration; return an image's URL.

    One chart per reward, one line per run; None without any.
    """
    points = [
        {
            "line": run,
            "reward": name.removeprefix("heldout_"),
            "iteration": row["iteration"],
            "value": value,
        }
        for run in runs
        if (file := folder / run / HELDOUT_CURVE).exists()
        for row in read_json(file, list)
        for name, value in sorted(row.items())
        if name.startswith("heldout_") and value is not None and math.isfinite(value)
    ]
    if not points:
        return None
    # Late: a flow run starts in a process of its own, and needs no chart before
    from g2rpo_core.reporting import charts

    return image_url(charts.png(charts.lines(points)))


def artifact_key(*words: str) -> str:
    """Return an artifact's key: lower-case letters, digits and dashes."""
    return re.sub(r"[^a-z0-9]+", "-", " ".join(words).lower()).strip("-")


def image_grid(root: Path, runs: list[str]) -> str | None:
    """Lay out the images of the first test prompts; return a URL, or None without images.

    One row per model, the base first. If several checkpoints or numbers of steps were evaluated,
    it shows the first by name.
    """
    models = [
        path
        for path in root.glob("evaluations/*/*/pictures")
        if path.parent.name in ("base-0", *runs)
    ]
    models.sort(key=lambda path: (path.parent.name != "base-0", natural(path.parent.name)))
    rows = [(by_name(path.glob("final-*")) or [path])[0] for path in models]
    names = sorted({file.name for folder in rows for file in folder.glob("*.png")})[:GRID_PROMPTS]
    if not names:
        return None
    # Paste each image at its prompt and model; what is missing stays black
    sheet = Image.new("RGB", (GRID_PIXELS * len(names), GRID_PIXELS * len(rows)))
    for y, folder in enumerate(rows):
        for x, name in enumerate(names):
            if (folder / name).exists():
                with reading(folder / name), Image.open(folder / name) as image:
                    small = image.convert("RGB").resize(
                        (GRID_PIXELS, GRID_PIXELS), Image.Resampling.BICUBIC
                    )
                    sheet.paste(small, (GRID_PIXELS * x, GRID_PIXELS * y))
    file = io.BytesIO()
    sheet.save(file, "PNG")
    return image_url(file.getvalue())


def image_url(png: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(png).decode()}"
