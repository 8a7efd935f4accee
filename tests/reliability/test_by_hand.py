"""Stages started by hand beside DVC's: no profile's outputs, lock or numbers mix with another's."""

import importlib
import shutil
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from g2rpo_core.distributed.checkpoint import publish
from g2rpo_core.foundation.runs import read_lock
from tests.fixtures.commands import run_here, run_module
from tests.fixtures.killed_stages import hashes
from tests.reliability.conftest import make_checkout

pytestmark = pytest.mark.pipeline
EVALUATE, TRAIN = "evaluate@g2rpo-1", "train@g2rpo-1"


@pytest.fixture
def known(project) -> Path:
    """The small project as a checkout whose run and evaluation DVC knows."""
    make_checkout(project)
    (project / "params.yaml").write_text(
        "profile: small\nmethods: [g2rpo]\nseeds: [1]\npublished: []\n"
    )
    run_module("dvc", "commit", "--force", TRAIN, EVALUATE, folder=project).check_returncode()
    return project


def change(profile: Path, section: str, **values: object) -> None:
    data = YAML().load(profile.read_text())
    data[section] |= values
    with profile.open("w") as file:
        YAML().dump(data, file)


def by_hand(module: str, folder: Path, profile: str, seed: int = 1):
    words = ("--profile", profile, "--method", "g2rpo", "--seed", seed)
    main = importlib.import_module(f"stages.{module}").main
    return run_here(main, *words, folder=folder)


def test_another_profiles_stage_changes_neither_lock_nor_numbers(known):
    """DVC has stages of the same method and seed, one of them out of date."""
    for name in ("models", "prompts", "embeddings"):
        shutil.copytree(known / name / "small", known / name / "mini")
    (known / "profiles" / "mini.yaml").write_text(
        "extends: small\ntraining: {iterations: 1, monitor: {every: 1}}\n"
    )
    change(known / "profiles" / "small.yaml", "evaluation", seed=12345)
    lock, reports, evaluations = (
        (known / "dvc.lock").read_bytes(),
        hashes(known / "reports"),
        hashes(known / "evaluations"),
    )
    for module in ("train", "evaluate"):
        done = by_hand(module, known, "mini")
        assert (
            done.returncode == 0
            and "DVC does not know this run: params.yaml does not name its profile" in done.stderr
        )
    others = {
        path: content
        for path, content in hashes(known / "reports").items()
        if path.startswith("others/mini/")
    }
    assert sorted(others) == [f"others/mini/{kind}/g2rpo-1.json" for kind in ("metrics", "timings")]
    assert (known / "dvc.lock").read_bytes() == lock and hashes(
        known / "reports"
    ) == reports | others
    assert evaluations.items() <= hashes(known / "evaluations").items()


def test_a_run_that_params_yaml_names_is_known_unless_it_changed_meanwhile(known, monkeypatch):
    """What DVC writes down is what the stage began with, or nothing."""
    before = read_lock(known / "dvc.lock")[EVALUATE]
    change(known / "profiles" / "small.yaml", "evaluation", seed=12345)
    done = by_hand("evaluate", known, "small")
    assert done.returncode == 0 and f"dvc status knows this run as {EVALUATE}" in done.stdout
    after = read_lock(known / "dvc.lock")[EVALUATE]
    assert after["outs"] != before["outs"] and after["params"] != before["params"]

    def edited(source: Path, output: Path) -> None:
        change(Path("profiles", "small.yaml"), "evaluation", seed=6)
        publish(source, output)

    monkeypatch.setattr("stages.evaluate.publish", edited)
    done = by_hand("evaluate", known, "small")
    assert (
        done.returncode == 0
        and "its settings, code or inputs have changed since it began" in done.stderr
    )
    assert read_lock(known / "dvc.lock")[EVALUATE] == after
