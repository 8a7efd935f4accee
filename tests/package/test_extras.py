"""The wheel in environments of what it asks for: the base, and the base with each extra.

Such an environment has the wheel and links to the files of the packages that its metadata names, at
the locked versions, with what those need in their turn. Nothing else of the environment that runs
the tests can be imported in it.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import venv
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator
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
TRAIN = """
import sys
from pathlib import Path
import torch
from g2rpo_core.algorithm.methods import METHODS
from g2rpo_core.config import load_profile
from g2rpo_core.data.embeddings import EmbeddingStore
from g2rpo_core.models.policy import Policy
from g2rpo_core.rewards import registry
from g2rpo_core.training.loop import train
from g2rpo_core.training.settings import RunSettings
from g2rpo_core.training.trainer import Trainer

profile = load_profile(Path("profiles/tiny.yaml"))
models, embeddings = Path("models/tiny"), EmbeddingStore(Path(sys.argv[1]))
policy = Policy.load_to_train(models / "pipeline", height=32, width=32, guidance=3.5)
before = {name: weight.clone() for name, weight in policy.transformer.state_dict().items()}
sampling = profile.sampling.model_copy(update={"steps": 6})
update = {"iterations": 1, "prompts_per_iteration": 1, "num_generations": 3}
settings = profile.training.model_copy(update=update)
rewards = registry.load(list(settings.rewards), models)
method = METHODS["g2rpo"].changed(tree={"sde_steps": (0,), "granularities": (1,)})
Path("state").mkdir()
run = RunSettings(method, sampling, settings)
trainer = Trainer(run, policy, embeddings, rewards, 0)
train(trainer, Path("state"), dict, lambda record: None)
weights = policy.transformer.state_dict().items()
print(sum(not torch.equal(weight, before[name]) for name, weight in weights), "moved")
"""
TRACK = """
from g2rpo_core.foundation.errors import UserError
from g2rpo_core.training.settings import TrackingSettings
from g2rpo_core.tracking.display import Tracking
try:
    Tracking("run", TrackingSettings(to=("tensorboard",))).warn(1, "as a text")
except UserError as error:
    print(error)
"""
READ = """
from PIL import Image, ImageDraw, ImageFont
from g2rpo_core.foundation.errors import UserError
from g2rpo_core.rewards import registry
image = Image.new("RGB", (256, 256), "white")
ImageDraw.Draw(image).text((20, 90), "OPEN", fill="black", font=ImageFont.load_default(60))
try:
    print(registry.load(["ocr"], "models")["ocr"]([image], ['a sign that says "open"']).item())
except UserError as error:
    print(error)
"""
DRAW = """
from g2rpo_core.reporting.charts import forest, svg
from g2rpo_core.reporting.statistics import paired_difference
from g2rpo_core.reporting.over_seeds import over_seeds
from g2rpo_core.reporting.tables import judged, tabulate
gain = {"method": "g2rpo", "seed": 1, "reward": "hps", "value": 2.0}
lines = judged(tabulate([gain | paired_difference([1.0, 2.0, 4.0], [0.0, 1.5, 3.0])], {}))
print(svg(forest(lines, over_seeds(lines), {"g2rpo": "G2RPO"}, {"hps": "HPS"}))[:4])
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


def test_the_base_trains(environment, folder, embeddings_folder):
    trained = environment("").run("-c", TRAIN, embeddings_folder, folder=folder)
    assert trained.returncode == 0 and re.search(
        r"^[1-9]\d* moved", trained.stdout, re.MULTILINE
    ), trained.stderr


@pytest.mark.parametrize("extra", EXTRAS)
def test_an_extra_brings_what_the_base_lacks(environment, tmp_path, extra):
    code = (
        "from importlib.util import find_spec; print(*sorted(name for name in "
        f"{sorted(EXTRAS[extra])} if find_spec(name)))"
    )
    assert environment("").run("-c", code, folder=tmp_path).stdout.split() == []
    assert environment(extra).run("-c", code, folder=tmp_path).stdout.split() == sorted(
        EXTRAS[extra]
    )


def test_without_its_extra_a_command_says_in_one_line_what_to_install(environment, folder):
    base = environment("")
    (folder / "dvc.yaml").touch()
    (folder / "stages").symlink_to(ROOT / "stages")
    for words, said in {
        ("demo",): "g2rpo demo needs gradio: pip install 'g2rpo[demo]'",
        (
            "serve-reward",
            "--reward",
            "hps",
        ): "g2rpo serve-reward needs fastapi: pip install 'g2rpo[serve]'",
        ("report",): "g2rpo report needs altair: pip install 'g2rpo[report]'",
        ("models",): "g2rpo models needs dvc: pip install 'g2rpo[flows]'",
    }.items():
        done = base.g2rpo(*words, folder=folder)
        assert (done.returncode, done.stdout, done.stderr) == (1, "", f"error: {said}\n")
    flows = base.run("-m", "flows.serve", "--help", folder=ROOT)
    assert flows.returncode == 1 and flows.stderr.endswith(
        "is not installed: pip install 'g2rpo[flows]'\n"
    ), flows.stderr
    assert flows.stderr.count("\n") == 1
    assert (
        "tensorboard is not installed: pip install 'g2rpo[track]', or leave it out"
        in base.run("-c", TRACK, folder=folder).stdout
    )
    assert (
        base.run("-c", READ, folder=folder).stdout
        == "rewards.ocr needs rapidocr: pip install 'g2rpo[ocr]'\n"
    )


def started(environment: "Environment", *words: object, folder: Path, until: str) -> Iterator[str]:
    """The lines that a command prints until one has these words; then it is stopped."""
    command = environment.command("-u", "-m", "g2rpo_core.cli", *words)
    process = subprocess.Popen(
        command, cwd=folder, env=bare(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert process.stdout
    try:
        for line in process.stdout:
            yield line
            if until in line:
                break
    finally:
        process.send_signal(signal.SIGTERM)  # a shell's background job ignores SIGINT
        process.communicate()


def test_the_extra_report_draws_charts_and_computes_intervals(environment, tmp_path):
    drawn = environment("report").run("-c", DRAW, folder=tmp_path)
    assert drawn.stdout == "<svg\n", drawn.stderr


def test_the_extra_flows_starts_the_command_that_serves_them(environment):
    code = "import flows.pipeline, flows.serve; flows.serve.arguments([]); print('ready')"
    done = environment("flows").run("-c", code, folder=ROOT)
    assert done.stdout == "ready\n", done.stderr


def test_the_extra_track_writes_curves(environment, tmp_path):
    done = environment("track").run("-c", TRACK, folder=tmp_path)
    assert done.returncode == 0 and list(
        (tmp_path / ".cache" / "live").rglob("events.out.tfevents*")
    ), done.stdout + done.stderr


def test_the_extra_ocr_reads_with_the_models_of_its_package(environment, tmp_path):
    done = environment("ocr").run("-c", READ, folder=tmp_path)
    assert done.stdout == "1.0\n", done.stdout + done.stderr
