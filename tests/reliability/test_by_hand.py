"""Stages started by hand beside DVC's: no profile's outputs, lock or numbers mix with another's."""

import importlib
import shutil
from pathlib import Path

import pytest

from g2rpo_core.foundation.runs import read_lock
from tests.fixtures.commands import run_here, run_module
from tests.fixtures.killed_stages import hashes
from tests.reliability.conftest import change, make_checkout

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
    kept = ("dvc.lock", "reports", "evaluations/small")
    before = {path: content for path, content in hashes(known).items() if path.startswith(kept)}
    for module in ("train", "evaluate"):
        done = by_hand(module, known, "mini")
        assert done.returncode == 0
        assert "DVC does not know this run: params.yaml does not name its profile" in done.stderr
    after = {path: content for path, content in hashes(known).items() if path.startswith(kept)}
    assert before.items() <= after.items()
    new = [f"reports/others/mini/{kind}/g2rpo-1.json" for kind in ("metrics", "timings")]
    assert sorted(after.keys() - before.keys()) == new


def test_a_run_that_params_yaml_names_is_known_to_dvc(known):
    before = read_lock(known / "dvc.lock")[EVALUATE]
    change(known / "profiles" / "small.yaml", "evaluation", seed=12345)
    done = by_hand("evaluate", known, "small")
    assert done.returncode == 0 and f"dvc status knows this run as {EVALUATE}" in done.stdout
    after = read_lock(known / "dvc.lock")[EVALUATE]
    assert after["outs"] != before["outs"] and after["params"] != before["params"]
