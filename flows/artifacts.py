"""Make a flow run's artifacts: results, report and images at its end, curves during training.

The training knows nothing of Prefect: everything is read from the files that it writes.
"""

import base64
import io
import json
import math
import re
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from uuid import UUID

from PIL import Image
from prefect.artifacts import create_image_artifact, create_link_artifact, create_table_artifact
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import ArtifactUpdate
from prefect.logging import get_run_logger

from g2rpo_core.foundation.errors import UserError
from g2rpo_core.foundation.files import complaint, read_json, reading
from g2rpo_core.foundation.profiles import read_chain
from g2rpo_core.foundation.runs import HELDOUT_CURVE, SCRATCH
from g2rpo_core.foundation.tables import read_numbers
from g2rpo_core.foundation.texts import natural, visible
from pipeline.graph import Stage

GRID_PROMPTS = 6
GRID_PIXELS = 128  # of one image's side
# training/loop.py's CURVE in the scratch folder of distributed/checkpoint.py, by profile
RECORDS = "*/{run}/*/records.jsonl"
# LIVE is that of tracking/display.py
RESUME, LIVE = SCRATCH / "train", Path(".cache", "live")
LAST_ROWS = 12


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
    files = by_name((root / "reports" / "metrics").glob("*.json"))
    rows = []
    for file in files:
        means = {name: round(value, 4) for name, value in read_numbers(file).items()}
        rows.append({"model": file.stem, **means})
    return rows


def reward_curve(folder: Path, runs: list[str]) -> str | None:
    """Draw the held-out rewards of a folder's runs; return an image's URL, None without a run."""
    curves = {
        run: read_curve(file) for run in runs if (file := folder / run / HELDOUT_CURVE).exists()
    }
    return curve_image(curves, ("heldout_",))


def curve_image(curves: dict[str, list[dict]], prefixes: tuple[str, ...]) -> str | None:
    """Draw columns with these prefixes by iteration; return an image's URL, or None without any.

    One chart per reward, one line per run and prefix.
    """
    columns = {
        name
        for curve in curves.values()
        for row in curve
        for name in row
        if name.startswith(prefixes)
    }
    # The spread within groups is on another scale than the rewards
    columns -= {name for name in columns if name.startswith("reward_std_")}
    bare = lambda name: next(
        name.removeprefix(prefix) for prefix in prefixes if name.startswith(prefix)
    )
    line_of = lambda run, name: (
        run if len(prefixes) == 1 else f"{run}, {name.removesuffix(f'_{bare(name)}')}"
    )
    points = [
        {
            "line": line_of(run, name),
            "reward": bare(name),
            "iteration": row["iteration"],
            "value": row[name],
        }
        for run, curve in curves.items()
        for row in curve
        for name in sorted(columns & row.keys())
        if row[name] is not None and math.isfinite(row[name])
    ]
    if not points:
        return None
    # Late: a flow run starts in a process of its own, and needs no chart before
    from g2rpo_core.reporting import charts

    return image_url(charts.png(charts.lines(points)))


def artifact_key(*words: str) -> str:
    """Return an artifact's key: lower-case letters, digits and dashes."""
    return re.sub(r"[^a-z0-9]+", "-", " ".join(words).lower()).strip("-")


def read_curve(file: Path) -> list[dict]:
    """Return the rows of a curve; UserError if there are none."""
    rows = read_json(file, list)
    if not rows or not all(
        isinstance(row, dict) and row.keys() == rows[0].keys() and "iteration" in row
        for row in rows
    ):
        raise UserError(complaint(file, "is not a training curve"))
    return rows


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


class Live:
    """The artifacts that one stage's task updates while it runs; only a training has any."""

    def __init__(self, stage: Stage):
        self.run = stage.name.partition("@")[2] if stage.group == "train" else ""
        self.project, self.name, self.since = stage.project, stage.name, time.time()
        self.artifacts: dict[str, UUID] = {}

    def update(self) -> None:
        """Update the artifacts to the last record, if any; server and file errors propagate."""
        file = self._file()
        records = read_records(file) if file else []
        if not file or not records:
            return
        # A link to the trackers' files
        curves = self.project / LIVE / file.parents[2].name / self.run
        if "live" not in self.artifacts and curves.exists():
            about = (
                f"curves and sample images of {self.run}, on the machine that trains: "
                f"tensorboard --logdir {LIVE}"
            )
            self.artifacts["live"] = create_link_artifact(
                curves.resolve().as_uri(), self.run, artifact_key("live", self.name), about
            )
        # The last rewards, newest first, and the curve so far
        table = [make_row(record) for record in records[: -LAST_ROWS - 1 : -1]]
        self._put(
            "rewards",
            json.dumps(table),
            partial(create_table_artifact, table),
            f"the last iterations of {self.run}",
        )
        if image := curve_image({self.run: records}, ("reward_", "heldout_")):
            about = f"rewards of {self.run} so far: of training, and of held-out prompts"
            self._put("curve", image, partial(create_image_artifact, image), about)

    def _put(self, name: str, data: str, create: Callable[[str, str], UUID], about: str) -> None:
        """Create an artifact of this data, or update the one that is there."""
        if name not in self.artifacts:
            self.artifacts[name] = create(artifact_key(name, self.name), about)
            return
        with get_client(sync_client=True) as client:
            client.update_artifact(self.artifacts[name], ArtifactUpdate(data=data))

    def _file(self) -> Path | None:
        """Return the newest file of records; None if it is older than the stage.

        An older one is from an attempt with other settings.
        """
        files = (self.project / RESUME).glob(RECORDS.format(run=self.run)) if self.run else ()
        written = {file: file.stat().st_mtime for file in files}
        newest = max(written, key=written.__getitem__, default=None)
        return newest if newest and written[newest] >= self.since - 1 else None


def read_records(file: Path) -> list[dict]:
    """Return every complete line, as the last may be half written; empty if the file is gone.

    A run removes its file when it ends.
    """
    try:
        lines = file.read_text().split("\n")[:-1]
    except FileNotFoundError:
        return []
    return [json.loads(line) for line in lines if line]


def make_row(record: dict) -> dict:
    """Return an iteration's rewards as a row of the table."""
    wanted = ("reward_", "heldout_", "grad_norm", "kl", "clip_ratio", "seconds")
    numbers = {
        key: value
        for key, value in record.items()
        if key.startswith(wanted) and math.isfinite(value)
    }
    return {
        "iteration": record["iteration"],
        **{key: float(f"{value:.4g}") for key, value in numbers.items()},
    }
