"""The core is small enough to be known, and everything experimental can be deleted."""

import ast
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.conftest import ROOT

TOOLS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]
RINGS, PACKAGES = TOOLS["rings"], ("g2rpo_core", "stages", "pipeline", "studies", "flows")
CORE_TESTS = (
    "tests/algorithm",
    "tests/sampling",
    "tests/training",
    "tests/evaluation",
    "tests/data",
)
IMPORT_ALL = """
import importlib, pkgutil, sys
from pathlib import Path
for package in sys.argv[1:]:
    importlib.import_module(package)
    for module in pkgutil.walk_packages([package], f"{package}."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
"""


def tracked(*places: str) -> list[str]:
    listed = subprocess.run(
        ["git", "ls-files", *places], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return [name for name in listed.stdout.splitlines() if (ROOT / name).exists()]


def statements(file: Path) -> int:
    """Statements of the syntax tree but for docstrings: they do not depend on the width of lines."""
    text = lambda node: (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )
    return sum(
        isinstance(node, ast.stmt) and not text(node)
        for node in ast.walk(ast.parse(file.read_text()))
    )


@pytest.fixture
def without(tmp_path):
    """without(rooms) -> a copy of the project that lacks these rooms."""

    def copy(*rooms: str) -> Path:
        folder = tmp_path / "project"
        for name in tracked():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
        for place in (place for room in rooms for place in RINGS["experimental"][room]):
            path = folder / place
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        return folder

    return copy


def check_imports(folder: Path) -> None:
    packages = [name for name in PACKAGES if (folder / name / "__init__.py").exists()]
    done = subprocess.run(
        [sys.executable, "-c", IMPORT_ALL, *packages], cwd=folder, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]


def test_the_core_keeps_to_its_budget():
    """Whoever changes the method must know it: it grows only by giving something up."""
    files = [
        name
        for name in tracked(*RINGS["core"])
        if name.endswith(".py") and name not in RINGS["not_core"]
    ]
    assert sum(statements(ROOT / name) for name in files) <= RINGS["budget"]


def test_what_is_experimental_is_what_main_may_not_import():
    contract = next(
        each
        for each in TOOLS["importlinter"]["contracts"]
        if each["name"] == "Main imports nothing experimental"
    )
    places = [place for places in RINGS["experimental"].values() for place in places]
    assert all(tracked(place) for place in places)
    inside = lambda module: any(
        f"{module.replace('.', '/')}".startswith(place.removesuffix(".py")) for place in places
    )
    assert all(inside(module) for module in contract["forbidden_modules"])


def test_without_anything_experimental_the_rest_loads(without):
    check_imports(without(*RINGS["experimental"]))


@pytest.mark.slow
@pytest.mark.parametrize("room", RINGS["experimental"])
def test_without_one_room_the_rest_loads(without, room):
    check_imports(without(room))


@pytest.mark.slow
def test_without_anything_experimental_the_tests_of_the_core_pass(without):
    folder = without(*RINGS["experimental"])
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-m",
        "not slow and not pipeline",
        *CORE_TESTS,
    ]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:]
