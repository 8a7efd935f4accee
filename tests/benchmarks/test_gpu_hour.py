"""The runner of GPU measurements on a CPU: all steps, in time, and none twice."""

import json
import os
import subprocess
import sys
from math import isnan

import pytest

from benchmarks.gpu_hour import EQUAL_COMPUTE, EQUAL_ITERATIONS, Runner, Step, steps
from benchmarks.gpu_table import packed, read, table
from g2rpo_core.config import load_profile
from g2rpo_core.config.costs import cost_of_prompt
from tests.conftest import ROOT
from tests.fixtures.projects import copy_checkout, git

CPU = ("--size", "tiny", "--device", "cpu")


def gpu_hour(*words: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "benchmarks.gpu_hour", *words]
    return subprocess.run(
        command,
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


@pytest.mark.slow
def test_a_step_leaves_its_figures(tmp_path):
    done = gpu_hour("--minutes", "14", "--out", str(tmp_path), *CPU, "--only", "kernels")
    assert done.returncode == 0, done.stdout + done.stderr
    measured = read(tmp_path)["kernels"]["result"]
    assert (
        measured["attention"]["math"]["gradient_relative"] == 0
        and 0 < measured["attention"]["flash"]["gradient_relative"] < 0.02
    )
    assert (
        0
        < measured["quantized"]["int8"]["output_relative"]
        < measured["quantized"]["nf4"]["output_relative"]
        < 0.1
    )
    assert min(measured["decoded"].values()) > 0 and min(measured["scored"].values()) > 0


@pytest.mark.slow
@pytest.mark.engines
def test_every_kind_of_step_runs_on_a_cpu_and_none_runs_twice(tmp_path):
    """One base and one method of each kind: the other steps differ in a number alone."""
    only = (
        "first",
        "first-deterministic",
        "base-0",
        "card",
        "compiled",
        "kernels",
        "flux",
        "base_scores-0",
    )
    runs = ("g2rpo-0", "dance_grpo-0", "nft_shared_compute-0")
    kinds = {step.words[:2] for step in steps() if step.name in only + runs}
    assert kinds == {step.words[:2] for step in steps()}
    start = lambda: gpu_hour(
        "--minutes", "14", "--out", str(tmp_path), *CPU, "--only", *only, *runs
    )
    done = start()
    assert done.returncode == 0, done.stdout + done.stderr
    results = read(tmp_path)
    assert set(results) == {*only, *runs}
    # On one device nothing but the name differs
    here, there = results["card"]["result"].values()
    assert here["records"] == there["records"] and here["scores"] == there["scores"]
    assert results["compiled"]["result"].keys() == {
        "g2rpo",
        "mix_grpo",
        "dance_grpo",
        "nft_shared_compute",
    }
    assert [line.count("|") for line in table(results)] == [8] * 5
    assert table(packed(results)) == table(results)
    # Again: all is there, so no process starts
    written = {file: file.stat().st_mtime_ns for file in tmp_path.glob("*.json")}
    assert start().returncode == 0 and written == {
        file: file.stat().st_mtime_ns for file in tmp_path.glob("*.json")
    }


def runner(folder, minutes: float) -> Runner:
    return Runner(folder, minutes, "tiny", "cpu")


def step_of(folder, name: str, code: str, **how) -> Step:
    """A step that runs a module of the test's own."""
    (folder / f"step_{name}.py").write_text(f"import json, sys, time\n{code}\n")
    return Step(name, 20.0, (f"step_{name}",), **how)


def test_what_would_not_end_in_time_is_not_begun(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    prints = step_of(tmp_path, "prints", "print(json.dumps({'given': sys.argv[1:]}))")
    assert runner(tmp_path / "out", 0.1).run([prints]) == ["prints"]
    assert "prints: not begun, with " in capsys.readouterr().out
    assert runner(tmp_path / "out", 5).run([prints]) == []
    written = json.loads((tmp_path / "out" / "prints.json").read_text())
    assert (
        written["result"]["given"] == ["--json", "--size", "tiny", "--device", "cpu"]
        and written["step"] == "prints"
    )


def test_a_step_that_fails_says_why_is_tried_again_and_holds_up_only_what_needs_it(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    breaks = step_of(tmp_path, "breaks", "sys.exit('no such kernel')", beside=True)
    after = step_of(tmp_path, "after", "print('{}')", beside=True, needs="breaks")
    other = step_of(tmp_path, "other", "print('{}')", beside=True)
    assert runner(tmp_path / "out", 5).run([breaks, after, other]) == ["breaks", "after"]
    said = capsys.readouterr().out
    assert (
        "breaks: failed (1): no such kernel" in said
        and "after: not begun, because breaks is not done" in said
    )
    assert (tmp_path / "out" / "breaks.failed").read_text() == "1: no such kernel\n"
    step_of(tmp_path, "breaks", "print('{}')")
    assert runner(tmp_path / "out", 5).run([breaks, after, other]) == []
    assert not (tmp_path / "out" / "breaks.failed").exists()


def test_what_is_running_at_the_deadline_is_stopped_with_all_its_processes(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    code = (
        "import subprocess; subprocess.run([sys.executable, '-c', 'import time; "
        f"time.sleep(3600)  # {tmp_path.name}'])"
    )
    waits = step_of(tmp_path, "waits", code, resumes=True)
    monkeypatch.setattr("benchmarks.gpu_hour.RESUMES", 1.0)
    assert runner(tmp_path / "out", 0.1).run([waits]) == ["waits"]
    assert (tmp_path / "out" / "waits.failed").read_text().startswith("stopped at the deadline")
    left = subprocess.run(
        ["pgrep", "--full", f"# {tmp_path.name}"], capture_output=True, text=True
    ).stdout
    assert left == ""


def test_without_a_gpu_the_default_steps_fail_in_one_line():
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu_hour"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 1 and done.stdout == "" and done.stderr.count("\n") == 1
    assert done.stderr.startswith("error: no CUDA device")


def test_the_figures_of_the_readme_are_those_that_came_home():
    results = read(ROOT / "benchmarks" / "h100.json")
    text = (ROOT / "benchmarks" / "README.md").read_text()
    shown = (
        text.split("<!-- small_gpu on an H100 -->\n")[1]
        .split("<!-- end of small_gpu -->")[0]
        .strip()
        .split("\n")
    )
    assert shown == table(results)
    rows = dict(row[:2] for row in results["first-deterministic"]["result"])
    assert rows["the same iteration twice: largest difference of weights"] == "0.0e+00"
    assert isnan(results["kernels"]["result"]["attention"]["cudnn"]["gradient_relative"])


def test_methods_at_equal_compute_take_what_g2rpo_takes():
    profile = load_profile(ROOT / "profiles" / "small_gpu.yaml")
    total = lambda name: (
        cost_of_prompt(profile.run(name)).total * profile.run(name).training.iterations
    )
    for name in EQUAL_COMPUTE:
        assert total(name) == pytest.approx(total("g2rpo"), rel=0.01), name
    assert {profile.run(name).training.iterations for name in EQUAL_ITERATIONS} == {60}


def test_small_gpu_is_the_papers_regime():
    run = load_profile(ROOT / "profiles" / "small_gpu.yaml").run("g2rpo")
    paper = load_profile(ROOT / "profiles" / "flux_hps_clip.yaml").run("g2rpo")
    assert (
        run.method == paper.method
        and run.sampling.steps == paper.sampling.steps == 16
        and run.sampling.dtype == "bfloat16"
    )
    of = lambda training: (
        training.prompts_per_iteration,
        training.num_generations,
        training.clip_range,
        training.adv_clip_max,
    )
    assert of(run.training) == of(paper.training) == (16, 12, 1e-4, 5.0)


@pytest.mark.slow
def test_small_gpu_runs_through_every_stage_on_a_cpu(tmp_path):
    """In small, by DVC, as a user starts it."""
    copy_checkout(tmp_path, ("tests/", "reports/", "dvc.lock"))
    (tmp_path / "params.yaml").write_text(
        "profile: small_gpu_check\nmethods: [g2rpo, mix_grpo]\nseeds: [1]\npublished: []\n"
    )
    git(tmp_path, "init", "--quiet")
    done = subprocess.run(
        [sys.executable, "-m", "dvc", "repro"], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "reports" / "report.json").read_text())
    assert (
        "g2rpo" in json.dumps(report)
        and (tmp_path / "reports" / "report.html").stat().st_size > 10_000
    )
