"""The wheel with what it asks for: the base, and the base with each extra.

Python finds the wheel's files before the checkout's, and no package but those that the wheel's
metadata names and what those need in their turn.
"""

import os
import shutil
import subprocess
import sys
from email import message_from_string
from functools import partial
from importlib.metadata import packages_distributions, requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.conftest import ROOT
from tests.fixtures.projects import link_made

pytestmark = pytest.mark.slow
OWN = {"g2rpo_core"}
EXTRAS = {  # what only the extra brings
    "demo": {"gradio", "starlette"},
    "serve": {"fastapi", "uvicorn"},
    "report": {"altair", "dvc", "scipy", "vl_convert"},
    "flows": {"altair", "dvc", "fastapi", "prefect", "scipy", "sqlalchemy", "vl_convert"},
    "track": {"tensorboard"},
    "ocr": {"onnxruntime", "rapidfuzz", "rapidocr"},
}
IMPORT_ALL = """
import importlib, pkgutil, g2rpo_core
for module in pkgutil.walk_packages(g2rpo_core.__path__, "g2rpo_core."):
    if module.name.endswith("__main__"):
        continue
    try:
        importlib.import_module(module.name)
    except ModuleNotFoundError as error:
        print(module.name.split(".")[1], error.name)
"""


START = """
import runpy, sys
sys.modules.update(dict.fromkeys(sys.argv.pop(1).split()))
module = sys.argv.pop(1)
sys.argv[0] = module
runpy.run_module(module, run_name="__main__", alter_sys=True)
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """The files of the checkout's wheel."""
    home = tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, home)
    leave = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "g2rpo_core", home / "g2rpo_core", ignore=leave)
    words = ["wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", home, home]
    subprocess.run([sys.executable, "-m", "pip", *words], check=True)
    shutil.unpack_archive(next(home.glob("*.whl")), home / "files", "zip")
    return home / "files"


@pytest.fixture
def folder(tmp_path, models) -> Path:
    """A folder with the profiles and the models of `tiny`."""
    link_made(tmp_path, "tiny", models, tmp_path)
    (tmp_path / "profiles").symlink_to(ROOT / "profiles")
    shutil.copy(ROOT / "params.yaml", tmp_path)
    return tmp_path


def found_with(wheel: Path, extra: str) -> set[str]:
    """The modules of all packages that the wheel with an extra asks for."""
    metadata = next(wheel.glob("*.dist-info/METADATA")).read_text()
    asked: dict[str, set[str]] = {}
    needed_by(message_from_string(metadata).get_all("Requires-Dist"), {extra}, asked)
    return {
        module
        for module, owners in packages_distributions().items()
        if asked.keys() & set(map(canonicalize_name, owners))
    }


def run(wheel: Path, extra: str, *words: object, folder: Path) -> subprocess.CompletedProcess:
    """`python -m` with these words where only those modules are found."""
    others = packages_distributions().keys() - found_with(wheel, extra) - OWN
    command = [sys.executable, "-c", START, " ".join(others), *map(str, words)]
    own = os.environ | {"PYTHONPATH": f"{wheel}:{folder}", "HF_HUB_OFFLINE": "1"}
    return subprocess.run(command, cwd=folder, env=own, capture_output=True, text=True)


def needed_by(requirements: list[str], extras: set[str], found: dict[str, set[str]]) -> None:
    """Add the packages that these requirements come to, and what those need, by name."""
    for requirement in map(Requirement, requirements):
        marker, name = requirement.marker, canonicalize_name(requirement.name)
        if marker and not any(marker.evaluate({"extra": each}) for each in {"", *extras}):
            continue
        if name not in found or not requirement.extras <= found[name]:
            found[name] = found.get(name, set()) | requirement.extras
            needed_by(requires(name) or [], found[name], found)


def test_the_base_imports_all_but_what_the_extras_are_for(wheel, tmp_path):
    (tmp_path / "import_all.py").write_text(IMPORT_ALL)
    done = run(wheel, "", "import_all", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    missing = {tuple(line.split()) for line in done.stdout.splitlines()}
    # cli: a module for each command, which loads when the command runs
    assert {package for package, _ in missing} == {"cli", "inference", "rewards", "reporting"}
    assert {module for _, module in missing} <= set().union(*EXTRAS.values())


def test_the_base_plans_and_samples(wheel, folder):
    g2rpo = partial(run, wheel, "", "g2rpo_core.cli", folder=folder)
    planned = g2rpo("plan", "--profile", "flux_smoke", "--gpus", "1")
    assert planned.returncode == 0 and "GPU-hours" in planned.stdout, planned.stderr
    sampled = g2rpo("generate", "a red circle", "--profile", "tiny", "--steps", "2")
    assert sampled.returncode == 0 and list((folder / "pictures").rglob("*.png")), sampled.stderr


@pytest.mark.parametrize("extra", EXTRAS)
def test_an_extra_brings_what_the_base_lacks(wheel, extra):
    assert not EXTRAS[extra] & found_with(wheel, "") and EXTRAS[extra] <= found_with(wheel, extra)


def test_without_its_extra_a_command_says_in_one_line_what_to_install(wheel, folder):
    (folder / "dvc.yaml").touch()
    (folder / "stages").symlink_to(ROOT / "stages")
    for words, said in {
        ("demo",): "g2rpo demo needs gradio: pip install 'g2rpo[demo]'",
        ("models",): "g2rpo models needs dvc: pip install 'g2rpo[flows]'",
    }.items():
        done = run(wheel, "", "g2rpo_core.cli", *words, folder=folder)
        assert (done.returncode, done.stdout, done.stderr) == (1, "", f"error: {said}\n")
