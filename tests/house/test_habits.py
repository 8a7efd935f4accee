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


def test_every_file_that_names_the_version_names_the_same():
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    newest = re.search(
        r"^## \[([\d.]+)\] - (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE
    )
    cited = re.findall(
        r"^(?:version|date-released): (.+)", (ROOT / "CITATION.cff").read_text(), re.MULTILINE
    )
    assert newest and newest[1] == version and cited == [newest[1], newest[2]]


def test_every_package_that_pyproject_asks_for_is_pinned():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pinned = {plain(name) for lock in environment.LOCKS for name, _, _ in pins(lock)}
    asked = [
        *project["dependencies"],
        *(each for extra in project["optional-dependencies"].values() for each in extra),
    ]
    assert {plain(re.match(r"[\w.-]+", each)[0]) for each in asked} <= pinned


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


def test_what_workflows_take_from_elsewhere_is_named_by_a_commit():
    used = [
        line
        for path in (ROOT / ".github").rglob("*.yml")
        for line in path.read_text().splitlines()
        if re.search(r"\b(uses|image|container):", line)
    ]
    assert used and all(re.search(r"uses: [\w/-]+@[0-9a-f]{40} # v\d", line) for line in used)


def plain(name: str) -> str:
    """A package's name as registries compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()
