"""A disk that is full in the middle of a stage: a small tmpfs in a mount namespace of its own."""

import os
import subprocess
import sys

import pytest

from tests.conftest import ROOT


def namespaces() -> bool:
    """Whether this machine lets its user mount a file system of his own."""
    try:
        return subprocess.run(["unshare", "-rm", "true"], capture_output=True).returncode == 0
    except FileNotFoundError:
        return False


@pytest.mark.slow
@pytest.mark.skipif(not namespaces(), reason="no mount namespaces for this user")
def test_a_full_disk_ends_a_stage_in_words_and_with_room_the_same_command_goes_on(
    project, tmp_path
):
    disk = tmp_path / "disk"
    disk.mkdir()
    done = subprocess.run(
        ["unshare", "-rm", sys.executable, "-m", "tests.fixtures.full_disk", project, disk],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
    )
    assert done.returncode == 0, done.stderr[-4000:]
