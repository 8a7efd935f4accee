import torch

from g2rpo_core.numerics.pins import read_processor
from g2rpo_core.numerics.processes import describe_processor, device_of
from tests.fixtures.errors import refused


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
