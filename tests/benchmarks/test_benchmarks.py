"""The benchmarks run and agree at a small size; what they measure is not judged here."""

import os
import re
import subprocess
import sys

import pytest

from benchmarks.rollout import compare
from g2rpo_core.numerics.pins import PINS
from tests.conftest import ROOT
from tests.fixtures.commands import run_module
from tests.fixtures.projects import copy_checkout, git


def printed(module: str, *words: str) -> str:
    # Benchmarks measure what the machine can do; compiled bfloat16 is not even right under the pins
    native = {name: value for name, value in os.environ.items() if name not in PINS}
    command = [sys.executable, "-m", f"benchmarks.{module}", "--size", "tiny", "--device", "cpu"]
    done = subprocess.run([*command, *words], cwd=ROOT, capture_output=True, text=True, env=native)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_the_published_loops_and_ours_agree_to_rounding(models, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    found = compare(models, tmp_path, "tiny", ["mix_grpo"], 1, "cpu", False)["mix_grpo"]
    assert found["evaluations"] == [192, 181]
    differences = found["max_difference"]
    assert differences["latents"] < 1e-4 and differences["rewards"] < 1e-4
    assert differences["gradients_relative"] < 5e-3


@pytest.mark.pipeline
def test_what_a_gpu_should_tell_first_is_one_table():
    rows = [line.strip("| ").split(" | ") for line in printed("gpu_first").splitlines()]
    said = {row[0].split(":")[0]: row[1] for row in rows[2:]}
    assert len(rows) == 14 and float(said["seconds of an iteration, the second time"]) > 0
    assert float(said["the same iteration twice"]) == 0
    assert float(said["HPS-v2.1's architecture in half precision"]) > 0


@pytest.mark.slow
def test_compiled_blocks_of_fluxs_shape_have_the_velocity_of_plain_ones():
    moved = re.findall(
        r"^(\w+) +moves a velocity by (\S+)", printed("flux", "--batches", "2"), re.MULTILINE
    )
    assert dict(moved)["eager"] == "0.0e+00" and all(float(by) < 0.05 for _, by in moved)


@pytest.mark.slow
def test_small_gpu_runs_through_every_stage_on_a_cpu(tmp_path):
    """In small, by DVC, as a user starts it."""
    copy_checkout(tmp_path, ("tests/", "reports/", "dvc.lock"))
    params = "profile: small_gpu_check\nmethods: [g2rpo, mix_grpo]\nseeds: [1]\npublished: []\n"
    (tmp_path / "params.yaml").write_text(params)
    git(tmp_path, "init", "--quiet")
    done = run_module("dvc", "repro", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "g2rpo" in (tmp_path / "reports" / "report.json").read_text()
