"""The comparison with emulated processors: an emulated one really runs where QEMU is installed."""

import shutil
import subprocess
import sys

import pytest

from g2rpo_core.config import load_profile
from g2rpo_core.foundation.errors import UserError
from g2rpo_core.numerics.probe import SMALL, operations
from tests.conftest import ROOT
from tools import foreign_processors
from tools.foreign_processors import compare, find_emulator, measure, write_profile


@pytest.mark.slow
@pytest.mark.skipif(
    not shutil.which("qemu-x86_64-static"), reason="needs QEMU's user mode (qemu-user-static)"
)
def test_a_processor_of_another_vendor_computes_the_same_bits():
    command = [sys.executable, "-m", "tools.foreign_processors", "--short"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    here, there, control = done.stdout.splitlines()
    count = len(dict(operations(SMALL)))
    assert done.returncode == 0 and here.endswith(f"{count} results")
    assert there.startswith(f"EPYC, emulated: {count} equal, 0 different")
    assert int(control.split(": ")[1].split()[0]) > 5


def test_the_settings_of_the_long_probe_fit_together(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert load_profile(write_profile()).sampling.steps == 6


def test_results_that_differ_are_counted_and_named(capsys):
    assert compare("EPYC", {"a": "1", "b": "2", "c": "3"}, {"a": "1", "b": "4"}, 7) == 2
    assert (
        capsys.readouterr().out
        == "EPYC, emulated: 1 equal, 2 different (7 s)\n  different: b\n  different: c\n"
    )


def test_a_probe_that_fails_ends_in_one_line_with_its_last_words(tmp_path):
    with pytest.raises(
        UserError,
        match=(
            "^env -i no-such-emulator: the probe ended with status 127: "
            ".*No such file or directory$"
        ),
    ) as error:
        measure(tmp_path / "out.json", True, ["env", "-i", "no-such-emulator"])
    assert "\n" not in str(error.value)


def test_without_qemu_and_without_its_package_it_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(foreign_processors, "QEMU", tmp_path / "qemu")
    bash = shutil.which("bash")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "bash").symlink_to(bash)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    with pytest.raises(
        UserError,
        match=(
            "^apt-get download qemu-user-static: .*not found: install QEMU's user mode, "
            "qemu-user-static$"
        ),
    ):
        find_emulator()
