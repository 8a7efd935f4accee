"""A disk that is full in the middle of a stage: a small tmpfs in a mount namespace of its own."""

import json
import os
import subprocess
import sys

import pytest

from tests.conftest import ROOT
from tests.fixtures.full_disk import ROOMS


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
    found = json.loads(done.stdout.splitlines()[-1])
    looked, first, later, files = found.pop("download")
    assert (
        "needs 0.0 GB" in looked
        and "no space left" in first
        and "no space left" in later
        and files == ["config.json", "scorer.pt"]
    )
    assert (
        "training g2rpo-1 needs" in found["train"]["room"] and "make room" in found["train"]["room"]
    )
    for name, about in found.items():
        filled = [said for room, status, said in about["said"] if status]
        assert len(filled) >= len(ROOMS[name]) // 2, name
        for said in filled:
            errors = [
                line for line in said.replace("\r", "\n").splitlines() if line.startswith("error: ")
            ]
            assert (
                len(errors) == 1
                and "disk is full" in errors[0]
                and "the same command resumes" in errors[0]
                and "Traceback" not in said
            )
        assert about["again"][0] == 0, about["again"]
        assert all(about["kept"].values())  # nothing finished is lost
        assert about["content"] == about["whole"]  # the bits of a run with room
