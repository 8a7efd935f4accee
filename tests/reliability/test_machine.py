"""Signals, a read-only disk, too few open files: one line, and no word of damage."""

import os
import re
import signal
import subprocess
import sys

import pytest
from ruamel.yaml import YAML

from g2rpo_core.foundation.progress import FOLLOWED
from tests.conftest import ROOT
from tests.fixtures.commands import run_module
from tests.fixtures.waiting import HUNG
from tests.reliability.conftest import STAGES, stage
from tests.reliability.test_full_disk import namespaces

pytestmark = pytest.mark.pipeline
# The tests read the first of a bar, which a log has after a minute
OWN = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", FOLLOWED: "1"}
ENVIRONMENT = os.environ | OWN
FEW = """\
import resource
from pathlib import Path
from g2rpo_core.foundation.files import reading
from stages.entry import ends_in_one_line
@ends_in_one_line
def main():
    resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40))
    with reading(Path("params.yaml")):
        files = [open("params.yaml") for _ in range(99)]
main()
"""
# Mounts a tmpfs over a folder, fills it with a checkout's files, makes it read-only and starts a
# command in it
READ_ONLY = (
    'mount -t tmpfs tmpfs "$1" && cp -r profiles params.yaml dvc.yaml .dvc "$1" && mount -o '
    'remount,ro "$1" && cd "$1" && shift && exec "$@"'
)


@pytest.mark.parametrize(
    "name, number",
    [
        ("embed", signal.SIGINT),
        ("evaluate", signal.SIGTERM),
    ],
)
def test_a_stop_signal_ends_a_stage_in_one_line_and_it_goes_on_later(project, name, number):
    profile = project / "profiles" / "small.yaml"
    data = YAML().load(profile.read_text())
    data["prompts"]["train_count"] = 900
    data["evaluation"] |= {"steps": [60], "batch": 1}
    with profile.open("w") as file:
        YAML().dump(data, file)
    if name == "embed":
        assert stage("prompts", project).returncode == 0
    module, *words = STAGES[name]
    command = [sys.executable, "-m", f"stages.{module}", *words]
    started = subprocess.Popen(command, cwd=project, env=ENVIRONMENT, stderr=subprocess.PIPE)
    said = b""
    while not re.search(
        rb"(embed train|evaluate g2rpo-1): ", said
    ):  # its progress bar: it is at work
        said += os.read(started.stderr.fileno(), 4096) or pytest.fail(said.decode())
    started.send_signal(number)
    said += started.communicate(timeout=HUNG)[1]
    assert (
        said.endswith(
            b"error: stopped; finished work is kept, and the same command resumes from it\n"
        )
        and said.count(b"error") == 1
    )
    assert started.returncode == 128 + signal.SIGTERM
    assert stage(name, project).returncode == 0


@pytest.mark.skipif(not namespaces(), reason="no mount namespaces for this user")
def test_a_read_only_disk_is_said_and_nothing_is_to_be_deleted(tmp_path):
    alone, started = (
        ["unshare", "-rm", "sh", "-c", READ_ONLY],
        [sys.executable, "-m", "stages.prompts"],
    )
    command = [*alone, "sh", tmp_path, *started, "--profile", "tiny"]
    done = subprocess.run(command, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True)
    last = done.stderr.strip().splitlines()[-1]
    assert (
        done.returncode == 1 and last.startswith("error: ") and "Read-only file system" in last
    ), done.stderr
    assert "Traceback" not in done.stderr and "delete" not in done.stderr


def test_too_few_open_files_are_said_and_no_file_is_called_damaged(project):
    (project / "few.py").write_text(FEW)
    done = run_module("few", folder=project)
    assert done.returncode == 1
    assert done.stderr == (
        "error: too many open files: allow more with `ulimit -n 4096`, "
        "and run the same command again; no file is damaged\n"
    )
