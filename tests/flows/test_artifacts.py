import base64
import io
import json
import shutil

import numpy as np
import pytest
from PIL import Image

from flows.artifacts import GRID_PIXELS, image_grid, results, reward_curve
from tests.conftest import ROOT


def pixels(url: str) -> np.ndarray:
    head, data = url.split(",")
    assert head == "data:image/png;base64"
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(data))).convert("RGB"))


@pytest.fixture
def project(tmp_path):
    """The committed metrics, two curves, and two models' images of one colour each."""
    shutil.copytree(ROOT / "reports" / "metrics", tmp_path / "reports" / "metrics")
    for seed in (1, 2):
        rows = [{"iteration": number, "heldout_hps": 0.1 * seed * number} for number in range(3)]
        (folder := tmp_path / "runs" / f"g2rpo-{seed}").mkdir(parents=True)
        (folder / "curve.json").write_text(json.dumps(rows))
    for run, colour in (("base-0", "red"), ("g2rpo-1", "blue"), ("left_over-1", "green")):
        folder = tmp_path / "evaluations" / "tiny" / run / "pictures" / "final-10"
        folder.mkdir(parents=True)
        for index in range(8):
            Image.new("RGB", (32, 32), colour).save(folder / f"{index}.png")
    return tmp_path


def test_the_table_has_every_model_and_its_measured_means(project):
    table = results(project)
    assert [row["model"] for row in table] == sorted(
        path.stem for path in (project / "reports/metrics").glob("*.json")
    )
    measured = json.loads((project / "reports/metrics/base-0.json").read_text())
    assert next(row for row in table if row["model"] == "base-0")["hps"] == pytest.approx(
        measured["hps"], abs=5e-5
    )


def test_the_curve_draws_every_run(project):
    all_runs = pixels(reward_curve(project / "runs", ["g2rpo-1", "g2rpo-2"]))
    (project / "runs/g2rpo-1/curve.json").unlink()
    assert all_runs.std() > 5 and not np.array_equal(
        all_runs, pixels(reward_curve(project / "runs", ["g2rpo-1", "g2rpo-2"]))
    )


def test_the_grid_has_one_row_a_model_base_first_and_no_run_of_another_graph(project):
    grid = pixels(image_grid(project, ["g2rpo-1"]))
    assert grid.shape == (2 * GRID_PIXELS, 6 * GRID_PIXELS, 3)
    assert (grid[10, 10] == (255, 0, 0)).all() and (
        grid[GRID_PIXELS + 10, -10] == (0, 0, 255)
    ).all()


def test_what_is_not_there_is_left_out(tmp_path):
    assert (
        results(tmp_path),
        reward_curve(tmp_path, ["g2rpo-1"]),
        image_grid(tmp_path, ["g2rpo-1"]),
    ) == ([], None, None)
