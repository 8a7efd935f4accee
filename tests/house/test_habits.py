"""Habits that a linter cannot hold."""

import ast
import re
import tomllib
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.fixtures.projects import git
from tools import environment

PARTS = {
    "tests": ("tests",),
    "tools": ("tools", "benchmarks"),
    "product": ("g2rpo_core", "stages", "pipeline", "flows", "studies"),
}


def statements(file: Path) -> int:
    """Count statements but for docstrings, which do not depend on the width of lines."""
    return sum(
        isinstance(node, ast.stmt)
        and not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))
        for node in ast.walk(ast.parse(file.read_text()))
    )


@pytest.mark.parametrize("part", PARTS)
def test_nothing_weighs_more_than_pyproject_allows(part):
    """The number is only lowered: what adds takes something away in the same commit."""
    most = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["weight"][part]
    files = git(ROOT, "ls-files", *PARTS[part]).splitlines()
    weight = sum(
        statements(ROOT / name) for name in files if name.endswith(".py") and (ROOT / name).exists()
    )
    assert weight <= most


def pins(lock: str) -> list[tuple[str, str, int]]:
    """Name, version and number of hashes of every entry of a lock."""
    text = re.sub(r"(?m)^ *#.*\n", "", (ROOT / lock).read_text()).replace("\\\n", " ")
    found = [
        (name, version, len(re.findall(r"--hash=sha256:[0-9a-f]{64}(?= |$)", rest)))
        for name, version, rest in re.findall(r"(?m)^([\w.-]+)===?([^\s;]+)(.*)$", text)
    ]
    assert len(found) == len(text.splitlines())  # nothing else, such as a range or an address
    return found


@pytest.mark.parametrize("lock", [*environment.LOCKS, "requirements-tools.lock"])
def test_every_pin_of_a_lock_has_the_hashes_of_its_files(lock):
    assert [name for name, _, hashes in pins(lock) if not hashes] == []


def test_both_builds_of_torch_are_locked_at_the_same_versions():
    pypi, cpu = (
        {name: version.split("+")[0] for name, version, _ in pins(lock)}
        for lock in (environment.PYPI_TORCH, environment.CPU_TORCH)
    )
    assert cpu == {name: pypi[name] for name in ("torch", "torchvision")}
