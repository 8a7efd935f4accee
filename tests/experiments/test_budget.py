"""The budget study: its rollouts cost what is reckoned and are otherwise the usual ones, and its plan fits its results."""

import pandas as pd
import pytest
import torch
from ruamel.yaml import YAML

from experiments import budget
from experiments.budget_variants import BudgetVariant, VariantSampler
from g2rpo_core.algorithm.methods import METHODS, Window
from g2rpo_core.data.prompts import prompt_order
from g2rpo_core.training.trainer import Trainer
from tests.conftest import ROOT
from tests.fixtures.commands import run_here
from tests.fixtures.rollouts import redness

PLAN = YAML(typ="safe", pure=True).load(budget.PLAN.read_text())
ONE_STEP = METHODS["g2rpo"].model_copy(
    update={"sde_steps": (0, 1, 3), "window": Window(size=1, order="scattered"), "granularities": (2,)}
)


@pytest.fixture
def arguments(policy, embeddings, tiny):
    """Those of a Trainer of one SDE step an iteration, with one prompt and six members."""
    sampling = tiny.sampling.model_copy(update={"steps": 8})
    training = tiny.training.model_copy(update={"num_generations": 6, "rewards": {"redness": 1.0}, "iterations": 6})
    return policy, ONE_STEP, sampling, training, embeddings, {"redness": redness}, 0


@pytest.mark.pipeline
def test_finishing_all_members_after_their_previews_is_the_usual_rollout(arguments, embeddings):
    conditioning = embeddings.conditioning(prompt_order(0, 1, len(embeddings), 0))
    usual = Trainer(*arguments).sampler(conditioning, 0)
    finished = VariantSampler(*arguments, BudgetVariant(keep=6))(conditioning, 0)
    assert finished.num_forward_evals == usual.num_forward_evals and finished.granularities == usual.granularities
    order = torch.cdist(finished.clean.flatten(0, 3).flatten(1), usual.clean.flatten(0, 3).flatten(1)).argmin(1)
    assert sorted(order.tolist()) == list(range(6))
    assert torch.allclose(finished.clean, usual.clean[:, :, :, order], atol=1e-4)
    for name in ("next_latents", "log_prob"):
        assert torch.equal(getattr(finished.transitions[0], name), getattr(usual.transitions[0], name)[:, order])


@pytest.mark.pipeline
@pytest.mark.parametrize(
    "variant",
    [BudgetVariant(keep=2), BudgetVariant(group_sizes={0: 3, 3: 4}), BudgetVariant(granularities={1: (1, 3), 3: (1,)})],
    ids=["keep", "group_sizes", "granularities"],
)
def test_a_variant_costs_what_was_reckoned(arguments, variant):
    records = list(Trainer(*arguments, sampler=VariantSampler(*arguments, variant)).run())
    branches = [ONE_STEP.branches(8, iteration, 0) for iteration in range(6)]
    assert len(set(branches)) == 3
    assert records[-1]["num_forward_evals"] == sum(variant.num_forward_evals(each, ONE_STEP, 8, 6) for each in branches)
    assert records[-1]["num_forward_evals"] != sum(BudgetVariant().num_forward_evals(each, ONE_STEP, 8, 6) for each in branches)
    assert max(record["old_policy_ratio_error"] for record in records) < 2e-5


@pytest.mark.parametrize("name", PLAN["variants"])
def test_every_variant_of_the_plan_is_what_its_results_are_of(name, tiny):
    """As many iterations and forward evaluations are reckoned now as its runs took."""
    entry = PLAN["variants"][name]
    assert entry.keys() <= {"method", "settings", "training", "variant"}
    variant = BudgetVariant(**entry.get("variant", {}))
    results = pd.read_parquet(budget.RESULTS)
    runs = results[results.variant == name].drop_duplicates(budget.KEY)
    assert len(runs)
    for run in runs.itertuples():
        training = budget.training_of_variant(entry, run.learning_rate, tiny)
        steps, group = tiny.sampling.steps, training.num_generations
        method, iterations = budget.fitted(budget.method_of_variant(entry, tiny), variant, run.budget, steps, group, run.seed)
        branches = (method.branches(steps, iteration, run.seed) for iteration in range(iterations))
        assert iterations == run.iterations
        assert sum(variant.num_forward_evals(each, method, steps, group) for each in branches) == run.evaluations


def test_the_results_hold_every_run_of_the_plan_and_are_printed_without_running_any():
    results = pd.read_parquet(budget.RESULTS)
    jobs = budget.jobs(PLAN, [1, 2, 3])
    assert {name for name, *_ in jobs} - {"base"} == set(PLAN["variants"])
    assert set(jobs) == set(results[budget.KEY].itertuples(index=False, name=None))
    done = run_here(budget.main, "--table", folder=ROOT)
    assert done.returncode == 0, done.stderr
    head, _, *lines = done.stdout.strip().split("\n")
    assert head.startswith("| variant | learning rate | NFE | ") and len(lines) == len({job[:3] for job in jobs}) - 1
