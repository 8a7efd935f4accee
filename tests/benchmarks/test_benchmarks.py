"""The benchmarks run and agree with themselves at a small size; what they measure is not judged here."""

import json
import subprocess
import sys

import pytest
import torch

from benchmarks.sparing import Savings, SparingTrainer
from g2rpo_core.methods import METHODS, Window
from g2rpo_core.prompts import visits
from g2rpo_core.trainer import Trainer

from ..conftest import ROOT
from ..test_trainer import redness


def last_line(*words: str) -> dict:
    done = subprocess.run([sys.executable, "-m", *words], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.strip().split("\n")[-1])


def test_the_published_loops_and_ours_agree_to_rounding(models):
    results = last_line(
        "benchmarks.rollout",
        "--size",
        "tiny",
        "--methods",
        "g2rpo",
        "mix_grpo",
        "--models",
        str(models),
        "--repeats",
        "1",
        "--json",
    )
    evaluations = {name: (one["published"]["evaluations"], one["ours"]["evaluations"]) for name, one in results.items()}
    assert evaluations == {"g2rpo": (2188, 1700), "mix_grpo": (192, 181)}
    for one in results.values():
        assert one["max_difference"]["latents"] < 1e-4
        assert one["max_difference"]["rewards"] < 1e-4
        assert one["max_difference"]["gradients_relative"] < 5e-3
        assert one["speedup"] == pytest.approx(one["published"]["seconds"] / one["ours"]["seconds"])


def test_the_gpu_benchmark_runs_on_a_small_model_without_one():
    result = last_line("benchmarks.flux", "--size", "tiny", "--device", "cpu", "--batches", "24", "--iteration", "--json")
    assert result["rollout_seconds"]["evaluations"] == {"ours": 1700, "published": 2188}
    for variant in result["variants"].values():
        assert variant["batches"]["24"]["ms_per_evaluation"] > 0
        assert variant["drift"]["velocity_relative"] < 0.05
    assert result["variants"]["eager"]["drift"]["velocity_relative"] == 0


def test_every_reward_scores_as_its_published_package(models):
    results = last_line(
        "benchmarks.rewards",
        "--models",
        str(models),
        "--prompts",
        "2",
        "--group",
        "3",
        "--repeats",
        "2",
        "--side",
        "32",
        "--json",
    )
    assert list(results) == ["hps", "clip_score", "pickscore", "image_reward", "unified_reward"]
    for one in results.values():
        assert list(one) == ["files", "tensors"]
        for found in one.values():
            assert found["max_difference"] < 1e-5  # at this size a tensor's 8 bits are the file's
            assert set(found["pictures_per_second"]) == {"ours", "published"} and found["ratio"] > 0
            assert all(0 < rate["min"] <= rate["median"] for rate in found["pictures_per_second"].values())


def test_load_is_measured_on_the_real_stages(models):
    found = last_line(
        "benchmarks.load", "prompts", "scaling", "--models", str(models), "--prompts", "40", "--processes", "2", "--json"
    )
    (prompts,) = found["prompts"]
    assert prompts["prompts"] == 40 and prompts["embed_mib"] > 100 and prompts["parquet_mib"] >= 0
    assert [(row["kind"], row["processes"], row["prompts"]) for row in found["scaling"]] == [("strong", 2, 2), ("weak", 2, 2)]
    assert all(row["seconds"] > 0 and row["of_one"] == 1 for row in found["scaling"])


def one_step(**settings):
    return METHODS["g2rpo"].model_copy(
        update={"noisy_steps": (0, 1, 3), "window": Window(size=1, order="scattered"), "granularities": (2,), **settings}
    )


def test_finishing_all_members_after_their_previews_is_the_usual_rollout(policy, embeddings, tiny):
    sampling = tiny.sampling.model_copy(update={"steps": 8})
    training = tiny.training.model_copy(update={"group_size": 6, "rewards": {"redness": 1.0}})
    arguments = (policy, one_step(), sampling, training, embeddings, {"redness": redness}, 0)
    conditioning = embeddings.conditioning(visits(0, 1, len(embeddings), 0))
    usual = Trainer(*arguments).sample(conditioning, 0)
    sparing = SparingTrainer(*arguments, savings=Savings(keep=6)).sample(conditioning, 0)
    assert sparing.evaluations == usual.evaluations
    order = torch.cdist(sparing.clean.flatten(0, 3).flatten(1), usual.clean.flatten(0, 3).flatten(1)).argmin(1)
    assert sorted(order.tolist()) == list(range(6))
    assert torch.allclose(sparing.clean, usual.clean[:, :, :, order], atol=1e-4)
    for name in ("next_latents", "log_prob"):
        assert torch.equal(getattr(sparing.taken[0], name), getattr(usual.taken[0], name)[:, order])


@pytest.mark.parametrize(
    "savings", [Savings(keep=2), Savings(group_sizes={0: 3, 3: 4}), Savings(granularities={1: (1, 3), 3: (1,)})]
)
def test_what_is_saved_is_what_was_reckoned(policy, embeddings, tiny, savings):
    sampling = tiny.sampling.model_copy(update={"steps": 8})
    training = tiny.training.model_copy(update={"group_size": 6, "rewards": {"redness": 1.0}, "iterations": 6})
    method = one_step()
    trainer = SparingTrainer(policy, method, sampling, training, embeddings, {"redness": redness}, 0, savings=savings)
    records = list(trainer.run())
    branches = [method.branches(8, iteration, 0) for iteration in range(6)]
    assert len(set(branches)) == 3
    assert records[-1]["evaluations"] == sum(savings.evaluations(one, method, 8, 6) for one in branches)
    assert records[-1]["evaluations"] != sum(Savings().evaluations(one, method, 8, 6) for one in branches)
    assert max(record["ratio_drift"] for record in records) < 2e-5
