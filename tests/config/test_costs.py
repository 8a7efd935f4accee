"""What a run costs, against the table of docs/findings.md and the committed tables of studies."""

import pandas as pd
import pytest

from g2rpo_core.config import load_profile, load_study, profile_path
from g2rpo_core.config.costs import Cost, cost_of
from tests.conftest import ROOT

FINDINGS = (ROOT / "docs" / "findings.md").read_text()


def test_the_verdicts_table_has_the_total_compute_and_images_of_every_method(monkeypatch):
    monkeypatch.chdir(ROOT)
    study = load_study("verdict")
    profile = load_profile(profile_path(study.profile), study)
    table = pd.read_parquet("studies/verdict/results.parquet")
    last = table[table.part == "training"].groupby(["method", "seed"]).last().groupby("method").mean(numeric_only=True)
    # Counted by hand from each method's settings: images an iteration, and whether there is a KL term
    for method, images in {"g2rpo_coarse": 12, "g2rpo": 180, "stepwise_flow_grpo": 121, "mix_grpo": 12, "flow_grpo": 12}.items():
        row = last.loc[method]
        counts = (round(row[name]) for name in ("iteration", "num_forward_evals", "num_transitions"))
        cost = cost_of(profile.run(method), 1001, *counts)
        assert cost.images == images * row.iteration and cost.guided == 1
        assert bool(cost.others) == (method in ("stepwise_flow_grpo", "flow_grpo"))
        assert f"| {cost.total:,.0f} | {cost.images:,.0f} | {row.iteration:,.0f} | {row.num_forward_evals:,.0f} |" in FINDINGS


def test_guidance_doubles_what_a_trained_state_costs(monkeypatch):
    monkeypatch.chdir(ROOT)
    profile = load_profile(profile_path("tiny_sd3"))
    run = profile.run("g2rpo")
    tree = run.method.tree.build(run.sampling.steps)
    of_one = run.training.prompts_per_iteration * tree.num_forward_evals(run.training.num_generations)
    cost = cost_of(run, 1, 10, 2 * 10 * of_one, 50)
    assert cost.guided == 2 and cost.total == pytest.approx(20 * of_one + 2 * 3 * 50 + cost.images / 2)
    assert Cost(100, 10, 20, 10).total == 100 + 30 + 10 + 10
