"""One, two and four real processes, sharded by FSDP2 over gloo, compute the same; a wrong world or a failing process ends all."""

import json
import os
import subprocess
import sys

import pytest
import torch

from .conftest import ROOT

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


@pytest.fixture(scope="module")
def ends(models, embeddings_folder, tmp_path_factory):
    """What worlds end with, by their kind and number of processes: the first process's part."""
    folder = tmp_path_factory.mktemp("worlds")
    (folder / "models").symlink_to(models)
    (folder / "embeddings").symlink_to(embeddings_folder)
    found = {}
    for kind, size in [("world", 1), ("world", 2), ("world", 4), ("hybrid", 4), ("adapter", 1), ("adapter", 2)]:
        command = [sys.executable, "-m", "tests.killed", folder, str(size), *([kind] if kind != "world" else [])]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=ENVIRONMENT)
        assert done.returncode == 0 and json.loads(done.stdout.splitlines()[-1])[0]["ended"] == [0], done.stderr[-2000:]
        found[kind, size] = torch.load(folder / f"end-{kind}-{size}-0.pt", weights_only=True)
    return found


@pytest.mark.parametrize("kind, size", [("world", 2), ("world", 4), ("hybrid", 4), ("adapter", 2)])
def test_worlds_compute_the_same(ends, kind, size):
    one, many = ends["adapter" if kind == "adapter" else "world", 1], ends[kind, size]
    for record, other in zip(one["records"], many["records"], strict=True):
        for key in record.keys() - {"seconds", "ratio_drift", "clip_share"}:
            assert other[key] == pytest.approx(record[key], rel=1e-3, abs=2e-6), key
    for gradient, other in zip(one["gradients"], many["gradients"], strict=True):
        torch.testing.assert_close(other, gradient, rtol=1e-2, atol=1e-3 * float(gradient.abs().max() + 1e-6))
    moved = torch.cat([weight.flatten() for weight in one["weights"]]) - torch.cat(
        [weight.flatten() for weight in many["weights"]]
    )
    assert moved.abs().mean() < 1e-6  # Adam's first steps are signs: where a gradient is rounding alone, so is its step
    torch.testing.assert_close(one["pictures"], many["pictures"], rtol=1e-3, atol=1e-4)


def test_a_world_that_is_not_the_one_asked_for_is_an_error(tmp_path):
    code = "from g2rpo_core.world import join; join(4)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**ENVIRONMENT, "WORLD_SIZE": "2", "RANK": "0"}
    )
    assert done.returncode == 1 and "processes: 4 asked for, but torchrun started 2" in done.stderr


def test_a_process_that_fails_ends_all_with_its_own_error(tmp_path):
    (tmp_path / "one_fails.py").write_text(
        "from g2rpo_core.world import join\n"
        "world, _ = join(2)\n"
        "world.barrier()\n"
        "if world.rank == 1:\n"
        "    raise RuntimeError('the second process has no picture')\n"
        "world.barrier()\n"
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", tmp_path / "one_fails.py"]
    done = subprocess.run(
        command, capture_output=True, text=True, env=ENVIRONMENT, timeout=300
    )  # the collective's own limit is an hour
    assert done.returncode != 0 and "RuntimeError: the second process has no picture" in done.stderr
