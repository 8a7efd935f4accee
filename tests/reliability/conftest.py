"""A project of seconds that has been through every stage, whose files the tests damage."""

import importlib
import shutil
import subprocess
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from g2rpo_core.config import load_profile
from tests.conftest import ROOT
from tests.fixtures.commands import run_here
from tests.fixtures.projects import git

STAGES = {  # of the small project: module and words
    "code": ("code", "--profile", "small"),
    "profile": ("profile", "--profile", "small"),
    "prompts": ("prompts", "--profile", "small"),
    "published": ("published", "--profile", "small"),
    "embed": ("embed", "--profile", "small"),
    "train": ("train", "--profile", "small", "--method", "g2rpo", "--seed", "1"),
    "evaluate_base": ("evaluate", "--profile", "small", "--method", "base", "--seed", "0"),
    "evaluate": ("evaluate", "--profile", "small", "--method", "g2rpo", "--seed", "1"),
    "report": ("report", "--profile", "small"),
}
SMALL = {
    "extends": "tiny",
    "prompts": {"train": "shapes", "train_count": 6, "test": "shapes", "test_count": 5},
    "embed": {"shard_rows": 5},
    "sampling": {"steps": 4, "decode_batch": 8},
    "training": {
        "iterations": 2,
        "num_generations": 2,
        "rewards": {"hps": 1.0, "clip_score": None},
        "monitor": {"every": 2, "prompts": 2, "rewards": ["hps"]},
        "checkpoints": {"every": 1},
        "tracking": {"to": [], "samples": None},
    },
    "methods": {
        "g2rpo": {"settings": {"tree": {"sde_steps": [0, 1], "granularities": [1, 2]}}},
        **{
            name: None
            for name in load_profile(ROOT / "profiles" / "tiny.yaml").methods
            if name != "g2rpo"
        },
    },
    "evaluation": {"steps": [2], "rewards": ["hps", "verifier"], "batch": 3, "diversity": None},
}


def change(profile: Path, section: str, **values: object) -> None:
    """Give settings of a profile's section other values."""
    data = YAML().load(profile.read_text())
    data[section] |= values
    with profile.open("w") as file:
        YAML().dump(data, file)


def stage(name: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """One stage of the small project, in this process."""
    module, *words = STAGES[name]
    return run_here(importlib.import_module(f"stages.{module}").main, *words, folder=folder)


def lay_out(folder: Path, models: Path) -> None:
    """The small project before any stage has run, with its models."""
    (folder / "profiles").mkdir(parents=True, exist_ok=True)
    shutil.copy(ROOT / "profiles" / "tiny.yaml", folder / "profiles" / "tiny.yaml")
    with (folder / "profiles" / "small.yaml").open("w") as file:
        YAML().dump(SMALL, file)
    (folder / "params.yaml").write_text("profile: small\nmethods: [g2rpo]\nseeds: [1]\n")
    (folder / "models").mkdir()
    shutil.copytree(models, folder / "models" / "small")
    (folder / "reports").mkdir()
    shutil.copy(ROOT / "dvc.lock", folder / "dvc.lock")


@pytest.fixture(scope="session")
def finished(models, once) -> Path:
    """The project after its last stage; to be copied before anything in it is changed."""

    def make(folder: Path) -> None:
        lay_out(folder, models)
        for name in STAGES:
            done = stage(name, folder)
            assert done.returncode == 0, (name, done.stderr)

    return once("finished", make)


@pytest.fixture
def project(finished, tmp_path) -> Path:
    """A copy of it."""
    return Path(shutil.copytree(finished, tmp_path / "project"))


def make_checkout(project: Path) -> None:
    """Make the project a repository of git and DVC with the stages' code; DVC knows no run."""
    for name in ("g2rpo_core", "stages"):
        shutil.copytree(ROOT / name, project / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("dvc.yaml", ".dvcignore"):
        shutil.copy(ROOT / name, project / name)
    (project / ".dvc").mkdir()
    shutil.copy(ROOT / ".dvc" / "config", project / ".dvc" / "config")
    (project / "dvc.lock").unlink()
    git(project, "init", "--quiet")
