"""Stages killed at seeded moments by one and two processes end with the bits of one left alone."""

import pytest

from tests.fixtures.commands import run_module
from tests.reliability.conftest import change


@pytest.mark.slow
@pytest.mark.parametrize(
    "processes, kills",
    [
        (1, {"embed": 2, "train": 4, "evaluate": 3, "report": 2}),
        (2, {"train": 4, "evaluate": 2}),
    ],
)
def test_stages_killed_at_any_moment_end_with_the_same_bits(project, processes, kills):
    profile = project / "profiles" / "small.yaml"
    training = {"iterations": 3, "snapshots": [1], "prompts_per_iteration": 2}
    training |= {"ema": {"decay": 0.6, "every": 2}, "learning_rate": 1e-3}
    change(profile, "training", **training, processes=processes)
    change(profile, "evaluation", checkpoints=["final", 1], processes=processes)
    words = (project, processes, *(f"{name}={count}" for name, count in kills.items()))
    done = run_module("tests.fixtures.killed_stages", *words, OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr[-4000:]
