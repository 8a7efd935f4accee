"""Stages killed at seeded moments by one and two processes end with the bits of one left alone."""

import json
from collections import Counter

import pytest
from ruamel.yaml import YAML

from g2rpo_core.tiny_models.build import BUILDERS
from tests.fixtures.commands import run_module


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
    data = YAML().load(profile.read_text())
    data["training"] |= {
        "iterations": 3,
        "snapshots": [1],
        "processes": processes,
        "prompts_per_iteration": 2,
    }
    data["evaluation"] |= {"checkpoints": ["final", 1], "processes": processes}
    fit = {"steps": 3, "batch": 8, "learning_rate": 1e-3}
    names = ("vae", "flux", *BUILDERS)
    data["models"] = {"source": "shapes", "seed": 0, "images": 64, **dict.fromkeys(names, fit)}
    with profile.open("w") as file:
        YAML().dump(data, file)
    words = (project, processes, *(f"{name}={count}" for name, count in kills.items()))
    done = run_module("tests.fixtures.killed_stages", *words, OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    for name, count in kills.items():
        about = found[name]
        print(name, Counter((event, path.split("/")[-1]) for _, _, event, path in about["moments"]))
        assert len(about["moments"]) == count and not any(about["last"])
        assert all(end == about["whole"] for end in about["ends"]), name
        # The scratch of a finished run is gone, but for what a longer run goes on from
        assert not [path for path in about["left"] if ".kept/" not in path]
