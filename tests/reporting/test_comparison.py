import pandas as pd
import pytest

from g2rpo_core.foundation.errors import UserError
from g2rpo_core.reporting.comparison import Side, changed_settings, changes
from g2rpo_core.reporting.tables import lines_of

PROFILE = {
    "training": {"learning_rate": 1e-3, "rewards": {"hps": 1.0}},
    "methods": {"g2rpo": {}, "dance_grpo": {"settings": {"tree": {"eta": 1}}}},
}


def shifted(results, method: str, by: float) -> pd.DataFrame:
    return results.assign(score=results.score + by * (results.method == method))


def test_runs_are_paired_by_prompt_and_told_apart_where_it_is_more_than_chance(results):
    before, after = (
        Side("a", PROFILE, results),
        Side("b", PROFILE, shifted(results, "g2rpo", 0.1).sample(frac=1, random_state=0)),
    )
    found = {(one.method, one.reward): one for one in lines_of(changes(before, after))}
    assert found["g2rpo", "hps"].tone == "up" and found["g2rpo", "hps"].difference == pytest.approx(
        0.1
    )
    assert found["dance_grpo", "hps"].tone == found["base", "hps"].tone == ""
    assert found["g2rpo", "hps"].intervals == [pytest.approx((0.1, 0.1))]


def test_settings_that_differ_are_those_of_methods_that_both_have(results):
    other = {
        "training": {"learning_rate": 2e-3, "rewards": {"hps": 1.0}, "lora": None},
        "methods": {"g2rpo": {"label": "x"}},
    }
    without = results[results.method != "dance_grpo"]
    assert changed_settings(Side("a", PROFILE, results), Side("b", other, without)) == [
        ("training.learning_rate", 1e-3, 2e-3),
        ("methods.g2rpo.label", None, "x"),
    ]


def test_what_cannot_be_paired_is_refused_in_words(results):
    with pytest.raises(
        UserError, match="a and b have no run in common: .*g2rpo-1.* against elsewhere-1"
    ):
        changes(
            Side("a", {}, results),
            Side("b", {}, results[results.method == "g2rpo"].assign(method="elsewhere")),
        )
    with pytest.raises(UserError, match="were evaluated on different prompts"):
        changes(
            Side("a", {}, results),
            Side("b", {}, results.assign(prompt_id="other-" + results.prompt_id)),
        )


def test_means_of_another_machine_are_compared_where_the_settings_are_equal(results):
    """The base's own means differ then; nothing else could tell that from other prompts."""
    means = (
        results.groupby(["method", "seed", "reward"], sort=False)
        .score.mean()
        .reset_index()
        .assign(prompt_id=None)
    )
    profile = {"prompts": {"seed": 0}, "evaluation": {"seed": 1}}
    here, there = Side("a", profile, shifted(results, "base", 0.2)), Side("b", profile, means)
    found = {(one.method, one.reward): one for one in lines_of(changes(here, there))}
    assert found["base", "hps"].difference == pytest.approx(-0.2)
    assert found["g2rpo", "hps"].difference == pytest.approx(0) and not found["g2rpo", "hps"].known
    with pytest.raises(UserError, match="were evaluated on different prompts"):
        changes(here, Side("b", profile | {"evaluation": {"seed": 2}}, means))
