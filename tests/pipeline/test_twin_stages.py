"""Small twins of base models through every stage, and over several processes."""

import json
import shutil

import pandas as pd
import pytest
import torch
from ruamel.yaml import YAML

from g2rpo_core.architectures.table import read_architecture
from g2rpo_core.config import load_profile
from stages import embed, evaluate, prompts, report, train
from tests.conftest import ROOT
from tests.fixtures.commands import run_here, run_module
from tests.fixtures.killed import HYBRID, WHOLE

pytestmark = pytest.mark.pipeline

GRPO = ("dance_grpo", "mix_grpo", "mix_grpo_flash", "flow_grpo", "flow_grpo_fast")
METHODS = ("g2rpo", "g2rpo_no_mgai", *GRPO)
# every method once; for the others, the method itself and an adapter
TWINS = [
    "sd3",
    *(pytest.param(name, marks=pytest.mark.slow) for name in ("qwen_image", "flux2", "zimage")),
]
SMALL = {
    "prompts": {"train_count": 6, "test_count": 4},
    "sampling": {"steps": 6},
    "training": {
        "iterations": 1,
        "num_generations": 4,
        "rewards": {"hps": 1.0, "clip_score": None},
        "monitor": {"every": 1, "prompts": 2, "rewards": ["hps"]},
        "tracking": {"to": ["tensorboard"], "samples": {"every": 1, "prompts": 1}},
    },
    "methods": {
        "dance_grpo": {"training": {"iterations": None, "monitor": None}},  # as the others
        "flow_grpo_fast": {"settings": {"tree": {"sde_steps": [0, 1, 2, 3, 4]}}},
        "adapted": {
            "method": "g2rpo_no_mgai",
            "settings": {"tree": {"sde_steps": [0, 1]}},
            "training": {"lora": {"rank": 2, "alpha": 6.0}, "learning_rate": 0.01},
        },
    },
    "evaluation": {"steps": [3], "rewards": ["hps", "verifier"], "batch": 3, "diversity": None},
}


@pytest.fixture(scope="module", params=TWINS)
def project(request, twin_models, tmp_path_factory):
    """A small checkout with profile `small` of a twin, taken through prompts and embed."""
    folder = tmp_path_factory.mktemp(request.param)
    shutil.copytree(ROOT / "profiles", folder / "profiles")
    YAML().dump({"extends": f"tiny_{request.param}", **SMALL}, folder / "profiles" / "small.yaml")
    (folder / "params.yaml").write_text("profile: small\nmethods: [g2rpo, adapted]\nseeds: [1]\n")
    (folder / "models").mkdir()
    (folder / "models" / "small").symlink_to(twin_models(request.param))
    (folder / "reports").mkdir()
    shutil.copy(ROOT / "dvc.lock", folder / "dvc.lock")
    for stage in (prompts, embed):
        done = run_here(stage.main, "--profile", "small", folder=folder)
        assert done.returncode == 0, done.stderr
    return folder


def base_of(folder):
    return read_architecture(folder / "models" / "small" / "pipeline")


def methods_of(folder) -> tuple[str, ...]:
    return METHODS if base_of(folder).label == "Stable Diffusion 3" else METHODS[:1]


def run(stage, folder, method: str, seed: int = 1) -> None:
    words = ("--profile", "small", "--method", method, "--seed", seed)
    done = run_here(stage.main, *words, folder=folder)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def trained(project):
    for name in (*methods_of(project), "adapted"):
        run(train, project, name)
    return project


def test_every_method_trains_and_counts_the_evaluations_of_its_guidance(trained):
    profile, runs = load_profile(trained / "profiles" / "small.yaml"), trained / "runs" / "small"
    load = base_of(trained).transformer.from_pretrained
    whole = load(trained / "models" / "small" / "pipeline" / "transformer")
    base, fixed = whole.state_dict(), {name for name, _ in whole.named_buffers()}
    for name in methods_of(trained):
        records = pd.read_parquet(runs / f"{name}-1" / "records.parquet")
        tree = profile.run(name).method.tree.build(6, 0, 1)
        assert records.num_forward_evals.tolist() == [0, 2 * tree.num_forward_evals(4)], name
        assert records.grad_norm.iloc[-1] > 0 and records.old_policy_ratio_error.max() < 1e-4, name
        weights = load(runs / f"{name}-1" / "transformer").state_dict()
        changed = {key for key in base if not torch.equal(weights.pop(key), base[key])}
        assert changed and not weights and not changed & fixed, name


def test_runs_are_evaluated_and_reported_beside_the_base(trained):
    for method, seed in (("base", 0), ("g2rpo", 1), ("adapted", 1)):
        run(evaluate, trained, method, seed)
    assert run_here(report.main, "--profile", "small", folder=trained).returncode == 0
    found = json.loads((trained / "reports" / "report.json").read_text())
    assert found.keys() >= {"base-0", "g2rpo-1", "adapted-1"}


def test_replicas_of_sharded_weights_and_their_table_of_positions_compute_the_same(
    sd3_models, sd3_embeddings_folder, tmp_path
):
    (tmp_path / "models").symlink_to(sd3_models)
    (tmp_path / "embeddings").symlink_to(sd3_embeddings_folder)
    runs = (f"{WHOLE}-1", f"{HYBRID}-2")
    done = run_module("tests.fixtures.killed", tmp_path, *runs, OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr[-2000:]
    alone, many = (torch.load(tmp_path / f"end-{run}-0.pt", weights_only=True) for run in runs)
    for record, other in zip(alone["records"], many["records"], strict=True):
        for key in record.keys() - {"seconds", "old_policy_ratio_error", "clip_ratio"}:
            assert other[key] == pytest.approx(record[key], rel=1e-3, abs=2e-6), key
    torch.testing.assert_close(alone["images"], many["images"], rtol=1e-3, atol=1e-3)
