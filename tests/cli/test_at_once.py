"""Commands that are started twice at once, each a process: nothing of either is lost."""

import csv
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from g2rpo_core.cli.main import main
from g2rpo_core.inference.pictures import LOCK
from tests.conftest import ROOT
from tests.fixtures.commands import run_here
from tests.fixtures.images import folder_to_score
from tests.fixtures.projects import small_project
from tests.fixtures.waiting import HUNG

pytestmark = pytest.mark.pipeline


def start(folder: Path, *words: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", "from g2rpo_core.cli.main import main; main()", *map(str, words)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_two_that_draw_into_one_folder_lose_no_picture_and_no_row(models, tmp_path):
    project = small_project(tmp_path, models)
    words = ["--steps", 2, "--seeds", "1-3", "--out", "out"]
    asked = ["a large red circle", "a small blue square"]
    both = [start(project, "generate", prompt, *words) for prompt in asked]
    said = [one.communicate(timeout=HUNG) for one in both]
    assert [one.returncode for one in both] == [0, 0], said
    with (project / "out" / "prompts.csv").open() as file:
        rows = {row["file"]: row["prompt"] for row in csv.DictReader(file)}
    pictures = {path.name: path for path in (project / "out").glob("*.png")}
    assert len(pictures) == 6 and rows.keys() == pictures.keys()
    assert sorted(rows.values()) == sorted(asked * 3)
    for name, path in pictures.items():
        with Image.open(path) as image:
            assert json.loads(image.text["g2rpo"])["prompt"] == rows[name]
    assert [path.name for path in (project / "out").glob(".*")] == [LOCK]
    # What a process that was killed was going to write counts no more, and the same is the same
    (project / "out" / f"{LOCK}-dead").write_text(json.dumps({"base-0002-1.png": {}}))
    again = run_here(main, "generate", "a red cross", *words, folder=project)
    same = run_here(main, "generate", asked[0], *words, folder=project)
    assert "out/base-0002-1.png" in again.stdout and set(same.stdout.split()) < {
        f"out/{name}" for name in pictures
    }


@pytest.mark.slow
def test_two_that_score_into_one_table_take_turns_and_leave_no_parts(models, tmp_path):
    folder_to_score(tmp_path)
    for name in (".scores.csv.0123456789abcdef.parts", ".other.csv.0123456789abcdef.parts"):
        (tmp_path / name).mkdir()
    words = ["--models", models, "--prompts", "prompts.txt", "images"]
    both = [start(tmp_path, "score", "--reward", name, *words) for name in ("hps", "pickscore")]
    said = [one.communicate(timeout=HUNG) for one in both]
    assert [one.returncode for one in both] == [0, 0], said
    assert len((tmp_path / "scores.csv").read_text().splitlines()) == 9
    assert [path.name for path in tmp_path.glob(".*parts")] == [".other.csv.0123456789abcdef.parts"]
