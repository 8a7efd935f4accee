"""What may be different at the next start: the number of processes."""

import json
import shutil

import pytest

from g2rpo_core.foundation.manifest import describe_files
from tests.fixtures.commands import run_module
from tests.reliability.test_by_hand import change

pytestmark = [pytest.mark.pipeline, pytest.mark.slow]


def test_a_killed_run_goes_on_with_another_number_of_processes(project):
    """From its checkpoint, not from the start; sums of gradients are rounded otherwise."""
    change(project / "profiles" / "small.yaml", "training", iterations=4, prompts_per_iteration=2)
    shutil.rmtree(project / ".cache")
    whole = describe_files(project / "runs").keys()
    words = (project, "continued", 1, 2)
    done = run_module("tests.fixtures.killed_stages", *words, OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert -9 in found["killed"] and found["kept"] and not any(found["ended"]), found
    last = int(found["kept"][-1].removesuffix(".tmp").split("-")[1])
    assert 1 < last < 4 and "4/4" in found["said"] and f" {last - 1}/4" not in found["said"], found
    assert describe_files(project / "runs").keys() == whole
