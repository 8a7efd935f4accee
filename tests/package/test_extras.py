"""The wheel in environments of what it asks for: the base, and the base with each extra.

Such an environment has the wheel and links to the files of the packages that its metadata names, at
the locked versions, with what those need in their turn. Nothing else of the environment that runs
the tests can be imported in it.
"""

import os
import re
import shutil
import subprocess
import sys
import venv
import zipfile
from collections import Counter
from collections.abc import Callable
from email import message_from_string
from functools import cache
from importlib.metadata import Distribution, distribution, distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.conftest import ROOT

pytestmark = pytest.mark.slow
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


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """The wheel of the checkout."""
    home = tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, home)
    shutil.copytree(
        ROOT / "g2rpo_core", home / "g2rpo_core", ignore=shutil.ignore_patterns("__pycache__")
    )
    words = ["wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", home, home]
    subprocess.run([sys.executable, "-m", "pip", *words], check=True)
    return next(home.glob("*.whl"))


@pytest.fixture(scope="module")
def environment(wheel, tmp_path_factory) -> Callable[[str], "Environment"]:
    """environment(extra) -> the wheel with that extra, '' for none."""
    made: dict[str, Environment] = {}
    return lambda extra: made.setdefault(
        extra, Environment(wheel, extra, tmp_path_factory.mktemp(extra or "base"))
    )


@pytest.fixture
def folder(tmp_path, models) -> Path:
    """A folder with the profiles and the models of `tiny`."""
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "tiny").symlink_to(models)
    (tmp_path / "profiles").symlink_to(ROOT / "profiles")
    shutil.copy(ROOT / "params.yaml", tmp_path)
    return tmp_path


class Environment:
    """A virtual environment with the wheel and what it asks for, and no pip."""

    def __init__(self, wheel: Path, extra: str, home: Path):
        venv.create(home)
        self.programs = home / "bin"
        site = next(home.glob("lib/python*/site-packages"))
        with zipfile.ZipFile(wheel) as packed:
            packed.extractall(site)
            metadata = next(name for name in packed.namelist() if name.endswith("METADATA"))
            asked = message_from_string(packed.read(metadata).decode()).get_all("Requires-Dist")
        owners = owners_of_folders()
        for package in needed_by(asked, extra).values():
            inside = [file for file in package.files or () if ".." not in file.parts]
            for part in {
                Path(file.parts[0]) if owners[file.parts[0]] == 1 else file for file in inside
            }:
                if (real := Path(package.locate_file(part))).exists():
                    (site / part).parent.mkdir(parents=True, exist_ok=True)
                    (site / part).symlink_to(real)
        here = Path(distribution("torch").locate_file(""))
        for fitted in here.glob("_torchvision_without_cuda*"):  # see tools/fit_torchvision.py
            (site / fitted.name).symlink_to(fitted)

    def command(self, *words: object) -> list[str]:
        return [str(self.programs / "python"), *map(str, words)]

    def run(self, *words: object, folder: Path) -> subprocess.CompletedProcess:
        return subprocess.run(
            self.command(*words), cwd=folder, env=bare(), capture_output=True, text=True
        )

    def g2rpo(self, *words: object, folder: Path) -> subprocess.CompletedProcess:
        return self.run("-m", "g2rpo_core.cli", *words, folder=folder)


def bare() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {
        "HF_HUB_OFFLINE": "1"
    }


@cache
def owners_of_folders() -> Counter[str]:
    """How many of the installed packages have a file in each folder at the top."""
    return Counter(
        top
        for package in distributions()
        for top in {file.parts[0] for file in package.files or ()}
    )


def needed_by(requirements: list[str], extra: str) -> dict[str, Distribution]:
    """The installed packages that these requirements come to, with what those need, by name."""
    found: dict[str, Distribution] = {}
    seen: set[tuple[str, str]] = set()
    waiting = [(text, each) for text in requirements for each in {"", extra}]
    while waiting:
        text, of = waiting.pop()
        requirement = Requirement(text)
        if requirement.marker and not requirement.marker.evaluate({"extra": of}):
            continue
        name = re.sub(r"[-_.]+", "-", requirement.name).lower()
        found[name] = distribution(name)
        for part in {"", *requirement.extras} - {each for known, each in seen if known == name}:
            seen.add((name, part))
            waiting += [(inner, part) for inner in found[name].requires or ()]
    return found


def test_the_base_imports_all_but_what_the_extras_are_for(environment, tmp_path):
    done = environment("").run("-c", IMPORT_ALL, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    missing = {tuple(line.split()) for line in done.stdout.splitlines()}
    # cli: a module for each command, which loads when the command runs
    assert {package for package, _ in missing} == {"cli", "inference", "rewards", "reporting"}
    assert {module for _, module in missing} <= set().union(*EXTRAS.values())


def test_the_base_plans_and_samples(environment, folder):
    planned = environment("").g2rpo("plan", "--profile", "flux_smoke", "--gpus", "1", folder=folder)
    assert planned.returncode == 0 and "GPU-hours" in planned.stdout, planned.stderr
    sampled = environment("").g2rpo(
        "generate", "a red circle", "--profile", "tiny", "--steps", "2", folder=folder
    )
    assert sampled.returncode == 0 and list((folder / "pictures").rglob("*.png")), sampled.stderr


@pytest.mark.parametrize("extra", EXTRAS)
def test_an_extra_brings_what_the_base_lacks(environment, tmp_path, extra):
    wanted = sorted(EXTRAS[extra])
    code = (
        "from importlib.util import find_spec; "
        f"print(*(name for name in {wanted} if find_spec(name)))"
    )
    found = [environment(each).run("-c", code, folder=tmp_path).stdout for each in ("", extra)]
    assert [names.split() for names in found] == [[], wanted]


def test_without_its_extra_a_command_says_in_one_line_what_to_install(environment, folder):
    (folder / "dvc.yaml").touch()
    (folder / "stages").symlink_to(ROOT / "stages")
    for words, said in {
        ("demo",): "g2rpo demo needs gradio: pip install 'g2rpo[demo]'",
        ("models",): "g2rpo models needs dvc: pip install 'g2rpo[flows]'",
    }.items():
        done = environment("").g2rpo(*words, folder=folder)
        assert (done.returncode, done.stdout, done.stderr) == (1, "", f"error: {said}\n")


def test_the_extra_flows_starts_the_command_that_serves_them(environment):
    code = "import flows.pipeline, flows.serve; flows.serve.arguments([]); print('ready')"
    done = environment("flows").run("-c", code, folder=ROOT)
    assert done.stdout == "ready\n", done.stderr
