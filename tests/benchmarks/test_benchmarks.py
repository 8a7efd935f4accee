"""The benchmarks run and agree at a small size; what they measure is not judged here."""

import json
import os
import subprocess
import sys

import pytest

from g2rpo_core.numerics.pins import PINS
from tests.conftest import ROOT


def last_line(*words: str) -> dict:
    # Benchmarks measure what the machine can do; compiled bfloat16 is not even right under the pins
    native = {name: value for name, value in os.environ.items() if name not in PINS} | {
        "OMP_NUM_THREADS": "1"
    }
    done = subprocess.run(
        [sys.executable, "-m", *words], cwd=ROOT, capture_output=True, text=True, env=native
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.strip().split("\n")[-1])


@pytest.mark.slow
@pytest.mark.parametrize(
    "evaluations",
    [{"mix_grpo": [192, 181]}],
)
def test_the_published_loops_and_ours_agree_to_rounding(evaluations, models):
    words = ["--size", "tiny", "--methods", *evaluations, "--repeats", "1", "--json"]
    results = last_line("benchmarks.rollout", "--models", str(models), *words)
    counted = {
        name: [result[loop]["evaluations"] for loop in ("published", "ours")]
        for name, result in results.items()
    }
    assert counted == evaluations
    for result in results.values():
        assert result["max_difference"]["latents"] < 1e-4
        assert result["max_difference"]["rewards"] < 1e-4
        assert result["max_difference"]["gradients_relative"] < 5e-3
        assert result["speedup"] == pytest.approx(
            result["published"]["seconds"] / result["ours"]["seconds"]
        )


@pytest.mark.pipeline
def test_what_a_gpu_should_tell_first_is_one_table(tmp_path):
    (tmp_path / "profiles").symlink_to(ROOT / "profiles")
    command = [sys.executable, "-m", "benchmarks.gpu_first"]
    native = {name: value for name, value in os.environ.items() if name not in PINS} | {
        "PYTHONPATH": str(ROOT)
    }
    start = lambda *words: subprocess.run(
        [*command, *words], cwd=tmp_path, capture_output=True, text=True, env=native
    )
    done = start("--size", "tiny", "--device", "cpu")
    assert done.returncode == 0, done.stderr
    rows = [
        line.strip("| ").split(" | ") for line in done.stdout.splitlines() if line.startswith("|")
    ]
    assert (tmp_path / ".cache" / "gpu_first.md").read_text() == done.stdout
    said = {row[0].split(":")[0]: row[1] for row in rows[2:]}
    assert (
        float(said["seconds of an iteration, the second time"]) > 0
        and float(said["the same iteration twice"]) == 0.0
    )
    assert float(said["HPS-v2.1's architecture in half precision"]) > 0 and len(rows) == 14
