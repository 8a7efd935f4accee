"""The whole pipeline by `dvc repro`, in a git checkout of its own, at a size of seconds."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
from diffusers import FluxPipeline
from ruamel.yaml import YAML

from g2rpo_core.tree import build

from ..conftest import ROOT
from .browser import open_page

FIT = {"steps": 4, "batch": 8, "learning_rate": 1e-3}


def run(command: list[str], folder: Path, **changes: str) -> subprocess.CompletedProcess:
    scripts = Path(sys.executable).parent
    path = {"PATH": f"{scripts}{os.pathsep}{os.environ['PATH']}", "DVC_NO_ANALYTICS": "1"}
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, env={**os.environ, **path, **changes})


def dvc(folder: Path, *words: str) -> str:
    done = run([str(Path(sys.executable).parent / "dvc"), *words], folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def project(tmp_path_factory) -> Path:
    """A fresh checkout with a profile `seconds`, taken through `dvc repro`."""
    folder = tmp_path_factory.mktemp("project")
    files = run(["git", "ls-files", "--cached", "--others", "--exclude-standard"], ROOT).stdout.split("\n")
    for file in filter(None, files):
        if (ROOT / file).exists() and not file.startswith(("tests/", "reports/metrics", "reports/curves", "dvc.lock")):
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / file, folder / file)
    yaml = YAML()
    profile = yaml.load(folder / "profiles" / "tiny.yaml")
    profile["models"] |= {"pictures": 64} | {name: FIT for name, value in profile["models"].items() if isinstance(value, dict)}
    profile["prompts"] |= {"train": "mine.txt", "train_count": 5, "test_count": 6}
    profile["training"] |= {"iterations": 2, "group_size": 2, "monitor": {"every": 1, "prompts": 3, "rewards": ["verifier"]}}
    # four steps teach nobody to answer in the words of a template, so UnifiedReward is left out
    profile["evaluation"] |= {
        "steps": 4,
        "rewards": [name for name in profile["evaluation"]["rewards"] if name != "unified_reward"],
    }
    yaml.dump(profile, folder / "profiles" / "seconds.yaml")
    # another profile than tiny, a prompt file of the user's own, and text that would harm a page
    (folder / "mine.txt").write_text("a red circle\na <b> & red\na blue cross\nein Hund\n\na square\n")
    (folder / "params.yaml").write_text("profile: seconds\nmethods: [g2rpo]\nseeds: [7]\n")
    run(["git", "init", "--quiet"], folder)
    checked = run([sys.executable, "-m", "stages.check"], folder)
    assert checked.returncode == 0, checked.stderr
    dvc(folder, "repro")
    return folder


def test_every_stage_left_its_outputs_in_the_lock(project):
    stages = YAML(typ="safe").load(project / "dvc.lock")["stages"]
    assert set(stages) == {"models", "prompts", "embed", "train@g2rpo-7", "evaluate_base", "evaluate@g2rpo-7", "report"}


def test_results_are_tidy_and_complete(project):
    table = pd.concat(
        pd.read_parquet(project / "evaluations" / "seconds" / run / "results.parquet") for run in ("base-0", "g2rpo-7")
    )
    assert list(table.columns) == ["method", "seed", "checkpoint", "steps", "prompt_id", "style", "reward", "score", "reason"]
    assert len(table) == 2 * 6 * 5 and table.score.notna().all() and table.reason.isna().all()
    assert len(list((project / "evaluations" / "seconds" / "g2rpo-7" / "pictures").glob("*.png"))) == 6


def test_plain_diffusers_loads_the_pipeline_that_was_built(project):
    pipeline = FluxPipeline.from_pretrained(project / "models" / "seconds" / "pipeline")
    pipeline.set_progress_bar_config(disable=True)
    image = pipeline("a large red circle at the left", height=32, width=32, num_inference_steps=2, max_sequence_length=16).images[
        0
    ]
    assert image.size == (32, 32)


def test_training_records_start_at_the_base_and_count_evaluations(project):
    records = pd.read_parquet(project / "runs" / "seconds" / "g2rpo-7" / "records.parquet")
    assert records.iteration.tolist() == [0, 1, 2]
    each = build([(k,) for k in range(5)], (1, 2, 3), 10).evaluations(group_size=2)
    assert records.evaluations.tolist() == [0, each, 2 * each]
    assert records.ratio_drift.max() < 2e-5
    assert records.filter(like="heldout_").notna().all().all()


def test_the_report_is_one_file_with_everything_in_it(project):
    page = (project / "reports" / "report.html").read_text()
    first = re.sub(r"<[^>]+>", "", page[page.index("<body>") :]).strip().split("\n")[0]
    assert "synthetic" in first and "Nothing on this page is a result of the paper" in first
    assert not re.findall(r'(?:src|href)="(?!data:|#)[^"]*"', page)
    assert "@import" not in page and "<script src" not in page
    assert page.count("data:image/png;base64,") == 2 * 6 + 2 * 6  # drawn at random, worst cases
    for word in (
        "HPS-v2.1",
        "CLIP Score",
        "PickScore",
        "ImageReward",
        "Verifier (exact)",
        "evaluations in rollouts",
        "dvc.lock train@g2rpo-7",
        "learning_rate",
    ):
        assert word in page
    assert first in (project / "reports" / "report.md").read_text()


@pytest.mark.parametrize("width", [390, 1600])
def test_the_report_works_in_a_browser(project, tmp_path, width):
    with open_page((project / "reports" / "report.html").as_uri(), tmp_path / "chromium", width) as page:
        assert page.evaluate("document.title") == "G²RPO report: seconds"
        assert page.evaluate("[...document.images].every(image => image.complete && image.naturalWidth === 32)")
        outside = (
            "e => e.getBoundingClientRect().right > innerWidth + 1 && !e.closest('.scroll')"  # wide tables scroll in their box
        )
        assert (
            page.evaluate(f"[...document.querySelectorAll('body *')].filter({outside}).map(e => e.outerHTML.slice(0, 99))") == []
        )
        assert page.evaluate("[...document.querySelectorAll('nav a, h2 a')].every(a => document.querySelector(a.hash))")
        first_column = (
            "[...document.querySelector('table.sortable').tBodies[0].rows].map(row => parseFloat(row.cells[2].textContent))"
        )
        click = "document.querySelector('table.sortable thead').rows[0].cells[2].click()"
        page.evaluate(click)
        falling = page.evaluate(first_column)
        page.evaluate(click)
        assert falling == sorted(falling, reverse=True) and page.evaluate(first_column) == falling[::-1]
        assert page.requests() == [(project / "reports" / "report.html").as_uri()]
        assert page.complaints() == []


def test_prompts_are_shown_as_text_and_never_run(project, tmp_path):
    """A prompt is what anybody wrote: markup in it must come out as the characters it is made of."""
    evil = '<img src=x onerror="document.title=1"><script>document.title=2</script>'
    source = (project / "prompts" / "seconds" / "test.parquet").read_bytes()
    prompts = pd.read_parquet(project / "prompts" / "seconds" / "test.parquet")
    try:
        prompts.assign(prompt=evil).to_parquet(tmp_path / "test.parquet")
        target = project / "prompts" / "seconds" / "test.parquet"
        target.unlink()  # the workspace's file may be a link into the cache
        target.write_bytes((tmp_path / "test.parquet").read_bytes())
        made = run([sys.executable, "-m", "stages.report", "--profile", "seconds"], project)
        assert made.returncode == 0, made.stderr
        with open_page((project / "reports" / "report.html").as_uri(), tmp_path / "chromium") as page:
            assert page.evaluate("document.title") == "G²RPO report: seconds"
            assert page.evaluate("document.querySelector('table.pictures tbody td').textContent") == evil
            assert page.complaints() == []
    finally:
        target.unlink()
        target.write_bytes(source)
        dvc(project, "repro", "--force", "--single-item", "report")


def test_nothing_runs_again_without_a_change(project):
    before = (project / "reports" / "report.html").read_bytes()
    assert "Data and pipelines are up to date." in dvc(project, "repro")
    dvc(project, "repro", "--force", "--single-item", "report")
    assert (project / "reports" / "report.html").read_bytes() == before


def test_dvc_understands_metrics_and_plots(project):
    metrics = json.loads(dvc(project, "metrics", "show", "--json"))
    assert "reports/metrics/evaluate/g2rpo-7.json" in json.dumps(metrics)
    dvc(project, "plots", "show", "--out", "plots")
    assert "heldout_hps" in (project / "plots" / "index.html").read_text()


def test_a_changed_parameter_runs_what_reads_it_and_nothing_else(project):
    profile = project / "profiles" / "seconds.yaml"
    profile.write_text(profile.read_text().replace("seed: 1223627", "seed: 5"))
    status = dvc(project, "status")
    assert {line.rstrip(":") for line in status.split("\n") if line and line[0] not in "\t "} == {
        "evaluate_base",
        "evaluate@g2rpo-7",
        "report",
    }


@pytest.mark.parametrize(
    "prompts, message",
    [("\n\n", "mine.txt: holds no prompt"), ("a red circle " * 20, "tokens, over the profile's embed.max_sequence_length = 16")],
)
def test_bad_prompts_end_before_any_work(project, prompts, message):
    original = (project / "mine.txt").read_text()
    (project / "mine.txt").write_text(prompts)
    try:
        done = run([sys.executable, "-m", "stages.check"], project)
    finally:
        (project / "mine.txt").write_text(original)
    assert done.returncode == 1
    assert message in done.stderr and done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
