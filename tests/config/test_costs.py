"""Costs of runs, against counts by hand and what the trainer counts."""

import pandas as pd
import pytest

from g2rpo_core.config import load_profile, load_study, profile_path
from g2rpo_core.config.costs import Cost, cost_of, cost_of_prompt
from g2rpo_core.config.profile import ResolvedRun
from tests.conftest import ROOT
from tests.fixtures.rollouts import small_method


@pytest.mark.parametrize(
    "method, images, anchored",
    [("g2rpo", 180, False), ("stepwise_flow_grpo", 121, True), ("flow_grpo", 12, True)],
)
def test_images_and_the_kl_term_of_a_prompt_are_those_counted_by_hand(
    monkeypatch, method, images, anchored
):
    monkeypatch.chdir(ROOT)
    study = load_study("verdict")
    cost = cost_of_prompt(load_profile(profile_path(study.profile), study).run(method))
    assert (cost.images, bool(cost.others), cost.guided) == (images, anchored, 1)


def test_guidance_doubles_what_a_trained_state_costs():
    run = load_profile(ROOT / "profiles" / "tiny_sd3.yaml").run("g2rpo")
    evaluations = 10 * run.training.prompts_per_iteration * cost_of_prompt(run).evaluations
    told = {"iteration": [5], "num_forward_evals": [evaluations], "num_transitions": [25]}
    cost = cost_of(run, 1, pd.DataFrame(told))
    assert cost.guided == 2 and Cost(100, 10, 20, 10, 2).total == 100 + 2 * (30 + 10) + 10


@pytest.mark.parametrize(
    "name, group, noises, updates",
    [
        ("mix_grpo", 3, 1, 2),
        ("tempflow_grpo", 6, 3, 4),
        ("flow_grpo", 4, 2, 2),
        ("g2rpo", 3, 1, "step"),
    ],
)
def test_the_trained_states_of_a_prompt_are_those_that_the_trainer_counts(
    make_trainer, settings, name, group, noises, updates
):
    """Members of one noise share its state, also if an optimizer step trains on some of them."""
    method = small_method(
        name, tree={"initial_noises": noises}, objective={"updates_per_rollout": updates}
    )
    sampling, training = settings
    trainer = make_trainer(method, num_generations=group)
    run = ResolvedRun(method, sampling, trainer.training, "mine", None, name)
    record = trainer.iterate(0)
    cost, prompts = cost_of_prompt(run), training.prompts_per_iteration
    counted = (record["num_transitions"], record["num_forward_evals"])
    assert counted == (prompts * cost.trained, prompts * cost.evaluations)
