"""The whole pipeline by `dvc repro`, in a git checkout of its own, at a size of seconds."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pandas as pd
import pytest
import torch
from diffusers import FluxPipeline, FluxTransformer2DModel
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
    profile["training"] |= {
        "iterations": 2,
        "group_size": 2,
        "snapshots": [1],
        "monitor": {"every": 1, "prompts": 3, "rewards": ["verifier"]},
    }
    # four steps teach nobody to answer in the words of a template, so UnifiedReward is left out
    profile["evaluation"] |= {
        "steps": [4, 2],
        "checkpoints": ["final", 1],
        "diversity": {"prompts": 4, "noises": 2},
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
    # 6 prompts, 5 rewards, 2 looks of every picture, 4 prompts' diversity; the base at 2 numbers of steps, the run's 2 checkpoints too
    assert len(table) == (2 + 4) * (6 * (5 + 2) + 4) and table.score.notna().all() and table.reason.isna().all()
    kinds = table[["method", "checkpoint", "steps"]].drop_duplicates()
    assert set(kinds.itertuples(index=False, name=None)) == {("base", "final", 4), ("base", "final", 2)} | {
        ("g2rpo", checkpoint, steps) for checkpoint in ("final", "1") for steps in (4, 2)
    }
    pictures = project / "evaluations" / "seconds" / "g2rpo-7" / "pictures"
    assert {folder.name: len(list(folder.glob("*.png"))) for folder in pictures.iterdir()} == dict.fromkeys(
        ["final-4", "final-2", "1-4", "1-2"], 6
    )


def test_checkpoints_are_the_weights_on_the_way(project):
    run = project / "runs" / "seconds" / "g2rpo-7"
    folders = [project / "models" / "seconds" / "pipeline", run / "snapshots" / "000001", run]
    base, first, last = (FluxTransformer2DModel.from_pretrained(folder / "transformer").state_dict() for folder in folders)
    apart = lambda one, other: sum((one[name] - other[name]).square().sum().item() for name in one)
    assert 0 < apart(base, first) < apart(base, last) and apart(first, last) > 0


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
        "Steps and checkpoints",
        "The same directions at coarser granularities",
        "diversity within a prompt",
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


STUDY = """
study: small
profile: seconds
seeds: [3]
title: Two & two
about: A <b>bold</b> claim.
methods: [first, second]
entries:
  first: {method: g2rpo, label: The first, settings: {noisy_steps: [0, 1], granularities: [1]}, training: {iterations: 1, snapshots: []}}
  second: {method: mix_grpo, label: The second, training: {rewards: {hps: 1.0}}}
changes: {evaluation: {steps: [2], checkpoints: [final], rewards: [hps, clip_score, verifier]}, training: {snapshots: []}}
"""


@pytest.fixture
def study(project) -> Path:
    """The folder of a study of two methods; gone after the test, however it ends."""
    folder = project / "studies" / "small"
    folder.mkdir()
    (folder / "params.yaml").write_text(STUDY)
    (folder / "dvc.yaml").symlink_to("../study.yaml")
    yield folder
    shutil.rmtree(folder)


def test_a_study_runs_beside_by_its_name(project, study, tmp_path):
    """Nothing that `dvc repro` made is made again or touched; the study's own report compares its own runs."""
    before = (project / "dvc.lock").read_bytes()
    done = run([sys.executable, "-m", "studies", "small"], project)
    assert done.returncode == 0, done.stderr
    assert "12/12" in done.stderr or "9/9" in done.stderr
    assert (project / "dvc.lock").read_bytes() == before
    page = (study / "reports" / "report.html").read_text()
    assert "Two &amp; two, profile" in page and "A &lt;b&gt;bold&lt;/b&gt; claim." in page
    assert "The first" in page and "The second" in page and "in-domain where underlined" in page
    assert set(YAML(typ="safe").load(study / "dvc.lock")["stages"]) == {
        "train@first-3", "train@second-3", "evaluate_base", "evaluate@first-3", "evaluate@second-3", "report",
    }  # fmt: skip
    again = run([sys.executable, "-m", "studies", "small"], project)
    assert again.returncode == 0 and not list(study.rglob("*.tmp")), again.stderr
    (study / "params.yaml").write_text(STUDY.replace("[0, 1]", "[0, 99]"))
    broken = run([sys.executable, "-m", "studies", "small"], project)
    assert broken.returncode == 1 and broken.stderr.count("\n") == 1
    assert "profiles/seconds.yaml with studies/small/params.yaml: methods.first: noisy step 99" in broken.stderr
    with open_page((study / "reports" / "report.html").as_uri(), tmp_path / "chromium") as shown:
        assert shown.complaints() == []


def test_an_unknown_study_names_the_known_ones(project):
    done = run([sys.executable, "-m", "studies", "compair"], project)
    assert done.returncode == 1
    assert done.stderr == "error: studies/compair/params.yaml: no such study; there are compare, granularities, steps\n"


def test_dvc_understands_metrics_and_plots(project):
    metrics = json.loads(dvc(project, "metrics", "show", "--json"))
    assert "reports/metrics/evaluate/g2rpo-7.json" in json.dumps(metrics)
    dvc(project, "plots", "show", "--out", "plots")
    assert "heldout_hps" in (project / "plots" / "index.html").read_text()


def test_a_changed_parameter_runs_what_reads_it_and_nothing_else(project):
    profile = project / "profiles" / "seconds.yaml"
    profile.write_text(profile.read_text().replace("seed: 1223627", "seed: 5"))
    status = dvc(project, "status", "dvc.yaml")
    assert {line.rstrip(":") for line in status.split("\n") if line and line[0] not in "\t "} == {
        "evaluate_base",
        "evaluate@g2rpo-7",
        "report",
    }


def test_dvc_repro_goes_on_after_a_kill_to_the_same_bits(project):
    """SIGKILL to DVC and all it started, in the midst of training; the next `dvc repro` begins at the checkpoint."""
    profile = project / "profiles" / "seconds.yaml"
    before = profile.read_text()
    yaml = YAML()
    changed = yaml.load(before)
    changed["training"] |= {
        "iterations": 30,
        "checkpoints": {"every": 1},
        "monitor": {"every": 30, "prompts": 3, "rewards": ["verifier"]},
    }
    with profile.open("w") as file:
        yaml.dump(changed, file)
    trained = project / "runs" / "seconds" / "g2rpo-7"
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    command = [str(Path(sys.executable).parent / "dvc"), "repro", "train@g2rpo-7"]
    try:
        child = subprocess.Popen(
            command, cwd=project, env={**os.environ, "PATH": path}, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            start_new_session=True,
        )  # fmt: skip
        end = time.monotonic() + 120
        while not list(project.glob(".cache/resume/train/seconds/g2rpo-7/*/iteration-0000[0-2][3-9]")):
            assert child.poll() is None and time.monotonic() < end
            time.sleep(0.02)
        os.killpg(child.pid, signal.SIGKILL)
        child.wait()
        assert not (trained / "records.parquet").exists()
        written = max(project.glob(".cache/resume/train/seconds/g2rpo-7/*/iteration-0000??"))
        so_far = [record["seconds"] for record in torch.load(written / "rank-0.pt", weights_only=True)["records"]]
        dvc(project, "repro", "train@g2rpo-7")
        weights = FluxTransformer2DModel.from_pretrained(trained / "transformer").state_dict()
        records = pd.read_parquet(trained / "records.parquet")
        assert len(so_far) > 3 and records.seconds.tolist()[: len(so_far)] == so_far  # these iterations were not made again
        records = records.drop(columns="seconds")
        dvc(project, "repro", "--force", "--single-item", "train@g2rpo-7")
        whole = FluxTransformer2DModel.from_pretrained(trained / "transformer").state_dict()
        assert all((weights[name] == whole[name]).all() for name in whole)
        pd.testing.assert_frame_equal(
            pd.read_parquet(trained / "records.parquet").drop(columns="seconds"), records, check_exact=True
        )
    finally:
        profile.write_text(before)


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
