import re
import subprocess
import sys

import pytest
import torch

from g2rpo_core.numerics.pins import read_processor
from g2rpo_core.numerics.processes import describe_processor, device_of
from tests.fixtures.errors import refused
from tests.fixtures.waiting import alive, until

ON_LINUX = pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a parent's end")
PARENT = (
    "import subprocess, sys; child = subprocess.Popen([sys.executable, '-c', sys.argv[1]]); "
    "print(child.pid, flush=True); child.wait()"
)


@ON_LINUX
def test_a_worker_ends_with_its_launcher_before_it_has_imported_torch():
    launcher = f"import os; os.environ['G2RPO_LAUNCHER'] = str(os.getpid()); {PARENT}"
    worker = (
        "import g2rpo_core, sys, time; print('torch' in sys.modules, flush=True); time.sleep(600)"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", launcher, worker], stdout=subprocess.PIPE, text=True
    )
    child = int(parent.stdout.readline())
    assert parent.stdout.readline() == "False\n"
    parent.kill()
    parent.wait()
    until(lambda: not alive(child))


def test_a_device_that_is_not_here_is_refused_in_one_line(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with refused("torch finds 2 GPU here"):
        device_of("cuda:3")


CPUINFO = """\
processor\t: 0
vendor_id\t: AuthenticAMD
cpu family\t: 25
model\t\t: 1
model name\t: AMD EPYC 7763 64-Core Processor
flags\t\t: fpu fma avx2

processor\t: 1
model name\t: of the second
"""


def test_a_processor_is_told_by_name_numbers_and_instructions(tmp_path):
    (tmp_path / "cpuinfo").write_text(CPUINFO)
    assert describe_processor(read_processor(tmp_path / "cpuinfo")) == {
        "name": "AMD EPYC 7763 64-Core Processor",
        "vendor": "AuthenticAMD",
        "family": "25",
        "model": "1",
        "avx2": True,
        "fma": True,
        "avx512f": False,
    }


def test_python_without_docstrings_is_refused_in_one_line():
    command = [sys.executable, "-OO", "-m", "g2rpo_core.cli", "--help"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1 and re.fullmatch(
        "error: PYTHONOPTIMIZE=2 .*: unset it\n", done.stderr
    )
