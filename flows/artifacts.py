"""The artifacts of a flow run: results table, report, reward curves and a grid of images, from the files that exist."""

import base64
import io
import re
from pathlib import Path

import httpx
from matplotlib.figure import Figure
from PIL import Image
from prefect.artifacts import create_image_artifact, create_link_artifact, create_table_artifact
from prefect.logging import get_run_logger

from g2rpo_core.errors import UserError
from g2rpo_core.files import complaint, read_json, reading, remade_by
from stages.graph import Stage

GRID_PROMPTS = 6
GRID_PIXELS = 128  # of one image's side


def publish(root: Path, stages: dict[str, Stage]) -> None:
    """Adds the artifacts to the calling flow run; leaves out what no stage has made yet and what `stages` do not make."""
    groups = {stage.group for stage in stages.values()}
    runs = sorted(stage.name.split("@")[1] for stage in stages.values() if "@" in stage.name)
    try:
        if table := results(root):
            create_table_artifact(table, "results", "mean rewards on the test prompts, from reports/metrics")
        if (page := root / "reports" / "report.html").exists() and "report" in groups:
            create_link_artifact(page.resolve().as_uri(), "report.html", "report", "the report, on the machine that made it")
        if curve := reward_curve(root):
            create_image_artifact(curve, "reward-curve", "mean rewards on held-out prompts during training, from reports/curves")
        if grid := image_grid(root, runs):
            create_image_artifact(grid, "grid", "the first test prompts; a row is a model")
    except httpx.HTTPError as error:  # the run's result does not depend on its artifacts
        get_run_logger().warning("artifacts could not be sent to the Prefect server: %s", error)
    except UserError as error:
        get_run_logger().warning("artifacts could not be made: %s", error)


def results(root: Path) -> list[dict]:
    """One row per model: its name and its mean rewards."""
    files = sorted((root / "reports" / "metrics").glob("*.json"))
    rows = []
    for file in files:
        again = remade_by("evaluate")
        means = read_json(file, again, dict)
        with reading(file, again):
            rows.append({"model": file.stem, **{name: round(value, 4) for name, value in means.items()}})
    return rows


def reward_curve(root: Path) -> str | None:
    """Every held-out reward of every run against its iterations, as the URL of an image; None without a run."""
    curves = {file.stem: curve_of(file) for file in sorted((root / "reports" / "curves").glob("*.json"))}
    return curve_image(curves, ("heldout_",))


def curve_image(curves: dict[str, list[dict]], prefixes: tuple[str, ...]) -> str | None:
    """The columns with these prefixes, of every run, against the iteration, as the URL of an image; None without such a column.

    One chart per reward, one line per run and prefix.
    """
    columns = {name for curve in curves.values() for row in curve for name in row if name.startswith(prefixes)}
    columns -= {name for name in columns if name.startswith("reward_std_")}
    bare = lambda name: next(name.removeprefix(prefix) for prefix in prefixes if name.startswith(prefix))
    rewards = list(dict.fromkeys(bare(name) for curve in curves.values() for row in curve for name in row if name in columns))
    if not rewards:
        return None
    figure = Figure(figsize=(4 * len(rewards), 3), layout="constrained")
    for axes, reward in zip(figure.subplots(1, len(rewards), squeeze=False)[0], rewards):
        for run, curve in curves.items():
            for prefix in prefixes:
                points = [(row["iteration"], row[f"{prefix}{reward}"]) for row in curve if f"{prefix}{reward}" in row]
                if points:
                    label = run if len(prefixes) == 1 else f"{run}, {prefix.rstrip('_')}"
                    axes.plot(*zip(*points), label=label)
        axes.set(title=reward, xlabel="iteration")
    axes.legend(fontsize="small")
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=80)
    return image_url(file)


def key_of(*words: str) -> str:
    """An artifact's key: lower-case letters, digits and dashes."""
    return re.sub(r"[^a-z0-9]+", "-", " ".join(words).lower()).strip("-")


def curve_of(file: Path) -> list[dict]:
    """The rows of a curve; UserError if there are none."""
    again = remade_by("train")
    rows = read_json(file, again, list)
    if not rows or not all(isinstance(row, dict) and row.keys() == rows[0].keys() and "iteration" in row for row in rows):
        raise UserError(complaint(file, "is not a training curve", again))
    return rows


def image_grid(root: Path, runs: list[str]) -> str | None:
    """The images of the first test prompts, one row per model (the base first), as the URL of an image; None without images.

    If several checkpoints or numbers of steps were evaluated, it shows the first by name.
    """
    models = [path for path in root.glob("evaluations/*/*/pictures") if path.parent.name in ("base-0", *runs)]
    models.sort(key=lambda path: (path.parent.name != "base-0", path.parent.name))
    rows = [min(path.glob("final-*"), default=path) for path in models]
    names = sorted({file.name for folder in rows for file in folder.glob("*.png")})[:GRID_PROMPTS]
    if not names:
        return None
    sheet = Image.new("RGB", (GRID_PIXELS * len(names), GRID_PIXELS * len(rows)))
    for y, folder in enumerate(rows):
        for x, name in enumerate(names):
            if (folder / name).exists():
                with reading(folder / name, remade_by("evaluate")), Image.open(folder / name) as image:
                    small = image.convert("RGB").resize((GRID_PIXELS, GRID_PIXELS), Image.Resampling.BICUBIC)
                    sheet.paste(small, (GRID_PIXELS * x, GRID_PIXELS * y))
    file = io.BytesIO()
    sheet.save(file, "PNG")
    return image_url(file)


def image_url(file: io.BytesIO) -> str:
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
