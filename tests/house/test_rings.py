"""The core is small enough to be known, and everything experimental can be deleted."""

import ast
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.fixtures.projects import git
from tests.fixtures.statements import statements

TOOLS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]
RINGS, PACKAGES = TOOLS["rings"], ("g2rpo_core", "stages", "pipeline", "studies", "flows")
CORE_TESTS = [
    f"tests/{name}" for name in ("algorithm", "sampling", "training", "evaluation", "data")
]
# Libraries load once; each folder's modules in a process forked from there
IMPORT_ALL = """
import gc, importlib, os, pkgutil, sys
from pathlib import Path

def import_all(packages):
    for package in filter(lambda name: Path(name, "__init__.py").exists(), packages):
        importlib.import_module(package)
        for module in pkgutil.walk_packages([package], f"{package}."):
            if not module.name.endswith("__main__"):
                importlib.import_module(module.name)

gc.disable()
for library in ("diffusers.models.transformers", "peft", "prefect", "scipy.stats", "altair"):
    importlib.import_module(library)
packages, folders = sys.argv[1].split(","), sys.argv[2:]
for folder in folders:
    if not (child := os.fork()):
        os.chdir(folder)
        import_all(packages)
        os._exit(0)
    if os.waitpid(child, 0)[1]:
        sys.exit(f"not without {Path(folder).name}")
"""


def tracked(*places: str) -> list[str]:
    return [name for name in git(ROOT, "ls-files", *places).splitlines() if (ROOT / name).exists()]


@pytest.fixture
def without(tmp_path):
    """without(rooms) -> a copy of the project that lacks these rooms."""

    def copy(*rooms: str) -> Path:
        folder = tmp_path / "-".join(rooms)
        for name in tracked():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
        for place in (place for room in rooms for place in RINGS["experimental"][room]):
            path = folder / place
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        return folder

    return copy


def check_imports(*folders: Path) -> None:
    command = [sys.executable, "-c", IMPORT_ALL, ",".join(PACKAGES), *map(str, folders)]
    done = subprocess.run(command, cwd=folders[0], capture_output=True, text=True)
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


def test_every_experimental_door_says_so():
    places = [ROOT / place for places in RINGS["experimental"].values() for place in places]
    doors = [place / "__init__.py" if place.is_dir() else place for place in places]
    assert [
        str(door)
        for door in doors
        if door.suffix == ".py"
        and "Experimental: " not in (ast.get_docstring(ast.parse(door.read_text())) or "")
    ] == []


def test_without_anything_experimental_the_rest_loads(without):
    check_imports(without(*RINGS["experimental"]))


@pytest.mark.slow
def test_without_any_one_room_the_rest_loads(without):
    check_imports(*map(without, RINGS["experimental"]))


@pytest.mark.slow
def test_without_anything_experimental_the_tests_of_the_core_pass(without):
    words = ["-q", "-p", "no:cacheprovider", "-m", "not slow and not pipeline", *CORE_TESTS]
    command = [sys.executable, "-m", "pytest", *words]
    folder = without(*RINGS["experimental"])
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:]
