"""Signals and too few open files: one line, and no word of damage."""

import os
import re
import signal
import subprocess
import sys

import pytest

from g2rpo_core.foundation.progress import FOLLOWED
from tests.conftest import ROOT
from tests.fixtures.commands import run_module
from tests.fixtures.waiting import HUNG
from tests.reliability.conftest import STAGES, change, stage

pytestmark = pytest.mark.pipeline
# The tests read the first of a bar, which a log has after a minute
ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", FOLLOWED: "1"}
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


@pytest.mark.parametrize(
    "name, number",
    [
        ("embed", signal.SIGINT),
        ("evaluate", signal.SIGTERM),
    ],
)
def test_a_stop_signal_ends_a_stage_in_one_line_and_it_goes_on_later(project, name, number):
    profile = project / "profiles" / "small.yaml"
    change(profile, "prompts", train_count=900)
    change(profile, "evaluation", steps=[60], batch=1)
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
    resumes = b"error: stopped; finished work is kept, and the same command resumes from it\n"
    assert said.endswith(resumes) and said.count(b"error") == 1
    assert started.returncode == 128 + signal.SIGTERM
    assert stage(name, project).returncode == 0


def test_too_few_open_files_are_said_and_no_file_is_called_damaged(project):
    (project / "few.py").write_text(FEW)
    done = run_module("few", folder=project)
    assert done.returncode == 1
    assert done.stderr == (
        "error: too many open files: allow more with `ulimit -n 4096`, "
        "and run the same command again; no file is damaged\n"
    )
