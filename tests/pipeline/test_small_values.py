"""The least values of settings are taken by every stage; other sizes are refused before any."""

import re
import shutil

import pytest
from ruamel.yaml import YAML

from pipeline import check
from stages import embed, evaluate, prompts, report, train
from tests.conftest import ROOT
from tests.fixtures.commands import run_here

# every stage runs with these
LEAST = {
    "prompts": {"train_count": 1, "test_count": 1},
    "embed": {"batch": 1, "shard_rows": 1},
    "sampling": {"batch_tokens": 1, "decode_batch": 1},
    "training": {
        "iterations": 1,
        "num_generations": 2,
        "batch_tokens": 1,
        "rewards": {"hps": 1.0, "clip_score": None},
        "monitor": {"every": 1, "prompts": 1, "rewards": ["verifier"]},
        "drift": {"patience": 2, "measurements": 2},
        "tracking": {"samples": {"every": 1, "prompts": 1}},
    },
    "evaluation": {
        "steps": [1],
        "rewards": ["hps", "verifier"],
        "batch": 1,
        "diversity": {"prompts": 1, "noises": 2},
    },
}
OTHER_SIZES = (
    {"evaluation": {"height": 8, "width": 8}},
    {"sampling": {"height": 8}},
    {"methods": {"nft_shared": {"sampling": {"width": 64}}}},
)


def project(folder, sections: dict, runs: str = "methods: [g2rpo]\nseeds: [1]\n"):
    (folder / "profiles").mkdir(exist_ok=True)
    shutil.copy(ROOT / "profiles" / "tiny.yaml", folder / "profiles" / "tiny.yaml")
    YAML().dump({"extends": "tiny", **sections}, folder / "profiles" / "least.yaml")
    (folder / "params.yaml").write_text(f"profile: least\n{runs}")
    return folder


def test_the_exact_reward_knows_the_size_of_its_images_before_any_work(tmp_path):
    for sections in OTHER_SIZES:
        told = run_here(check.main, folder=project(tmp_path, sections)).stderr
        assert "the verifier only knows images of 32 x 32 pixels" in told, sections


@pytest.mark.pipeline
def test_every_stage_takes_the_least_and_the_report_says_what_an_interval_needs(models, tmp_path):
    runs = "methods: [g2rpo, nft_shared]\nseeds: [1]\n"
    folder = project(tmp_path, LEAST, runs)
    (folder / "models").mkdir()
    (folder / "models" / "least").symlink_to(models)
    of = lambda method, seed: ("--profile", "least", "--method", method, "--seed", seed)
    for stage, *words in (
        (check,),
        (prompts, "--profile", "least"),
        (embed, "--profile", "least"),
        *((train, *of(method, 1)) for method in ("g2rpo", "nft_shared")),
        *((evaluate, *of(*run)) for run in (("base", 0), ("g2rpo", 1), ("nft_shared", 1))),
        (report, "--profile", "least"),
    ):
        done = run_here(stage.main, *words, folder=folder)
        assert done.returncode == 0, (stage, done.stderr)
    page = (folder / "reports" / "report.html").read_text()
    assert "An interval over prompts needs at least two test prompts with scores" in page
    assert not re.search(r"[>+-]nan|\bnan[ <]", page)  # as Python writes it
    assert "NaN" not in (folder / "reports" / "report.json").read_text()
