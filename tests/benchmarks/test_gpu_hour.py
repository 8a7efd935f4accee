"""The runner of GPU measurements on a CPU: all steps, in time, and none twice."""

import json
import subprocess
import sys

import pytest

from benchmarks.gpu_hour import STEPS
from tests.conftest import ROOT
from tests.fixtures.projects import copy_checkout, git


@pytest.mark.slow
def test_every_step_runs_on_a_cpu_and_none_runs_twice(tmp_path):
    command = [sys.executable, "-m", "benchmarks.gpu_hour", "--out", str(tmp_path)]
    command += ["--size", "tiny", "--device", "cpu", "--minutes"]
    start = lambda minutes: subprocess.run(
        [*command, str(minutes)], cwd=ROOT, capture_output=True, text=True
    )
    done = start(30)
    assert done.stdout.splitlines() == [f"{name}: done" for name in STEPS], done.stderr
    flux = json.loads((tmp_path / "flux.json").read_text())
    assert flux["rollout_seconds"]["evaluations"] == {"ours": 1700, "published": 2188}
    assert flux["variants"]["eager"]["drift"]["velocity_relative"] == 0
    for variant in flux["variants"].values():
        assert variant["drift"]["velocity_relative"] < 0.05
    again = start(0)
    assert (again.returncode, again.stdout) == (0, "")


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
    assert "g2rpo" in json.dumps(report)
