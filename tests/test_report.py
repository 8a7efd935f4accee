from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest

from g2rpo_core.charts import curves
from g2rpo_core.report import (
    METHOD_LABELS,
    difference,
    main_table,
    method_pairs,
    missing_table,
    most_changed,
    standings,
    style_table,
    summary,
    tone,
    win_rates,
)
from stages.report import paper_rows

RUNS = [("g2rpo", 1), ("dance_grpo", 1)]
WEIGHTS = {"hps": 2.0, "clip_score": 1.0}
TRAINED_ON = {method: WEIGHTS for method, _ in RUNS}


@pytest.fixture
def results():
    """Two rewards of 50 prompts: the base, and two runs that are better by 0.1 and worse by 0.2 in the first reward alone."""
    rng = np.random.default_rng(0)
    prompts = [f"p{n}" for n in range(50)]
    base = {"hps": rng.normal(0.3, 0.1, 50), "clip_score": rng.normal(0.5, 0.1, 50)}
    parts = []
    for method, seed, shift in (("g2rpo", 1, 0.1), ("base", 0, 0.0), ("dance_grpo", 1, -0.2)):
        order = rng.permutation(50)  # prompts may stand in any order: pairing is by id
        for reward, values in base.items():
            scores = values[order] + (shift if reward == "hps" else 0.0)
            parts.append(
                pd.DataFrame(
                    {
                        "method": method,
                        "seed": seed,
                        "style": np.where(order % 5, "one", "two"),
                        "prompt_id": np.array(prompts)[order],
                        "reward": reward,
                        "score": scores,
                    }
                )
            )
    return pd.concat(parts, ignore_index=True)


def test_differences_are_paired_by_prompt_and_the_base_comes_first(results):
    rows = main_table(results, ("base", 0), RUNS, ["hps", "clip_score"], TRAINED_ON)
    assert [row.method for row in rows] == ["base", "g2rpo", "dance_grpo"]
    assert rows[0].cells["hps"].difference is None
    for row, shift in zip(rows[1:], (0.1, -0.2)):
        found = row.cells["hps"].difference
        assert (found.mean, found.low, found.high) == pytest.approx((shift, shift, shift))
        assert row.trained.mean == pytest.approx(2 * shift)
        assert row.cells["clip_score"].difference.mean == pytest.approx(0)


def test_seeds_are_values_of_their_own_and_two_say_nothing_of_a_spread(results):
    treated = results[results.method == "g2rpo"]
    runs = [("g2rpo", seed) for seed in range(1, 4)]
    several = [treated.assign(seed=seed, score=treated.score + 0.01 * seed * (treated.reward == "hps")) for seed in range(1, 4)]
    table = pd.concat([results[results.method == "base"], *several])
    rows = main_table(table, ("base", 0), runs, ["hps", "clip_score"], TRAINED_ON)
    (found,) = standings(rows, ["g2rpo"], ["clip_score"])
    assert found.method == "g2rpo" and found.above == {}
    assert found.gain.values == pytest.approx((0.22, 0.24, 0.26)) and found.gain.mean == pytest.approx(0.24)
    assert found.gain.high - found.gain.mean == pytest.approx(4.303 * 0.02 / 3**0.5)
    assert found.held_out["clip_score"].mean == pytest.approx(0)
    assert standings(rows[:-1], ["g2rpo"], []) == []


def test_methods_are_ranked_over_seeds_and_told_apart_seed_by_seed(results):
    """Seeds differ by more than methods do: only paired by seed are they told apart, and the third, which changes sides, never is."""
    base, treated = results[results.method == "base"], results[results.method == "g2rpo"]
    shifts = {"g2rpo": (0.1, 0.3, 0.5), "dance_grpo": (0.0, 0.21, 0.39), "mix_grpo": (0.2, 0.1, 0.6)}
    parts = [
        treated.assign(method=method, seed=seed, score=treated.score + shift * (treated.reward == "hps"))
        for method, values in shifts.items()
        for seed, shift in enumerate(values)
    ]
    runs = [(method, seed) for method in shifts for seed in range(3)]
    trained_on = {method: WEIGHTS for method in shifts}
    rows = main_table(pd.concat([base, *parts]), ("base", 0), runs, ["hps"], trained_on)
    found = standings(rows, list(shifts), [])
    assert [one.method for one in found] in (["g2rpo", "mix_grpo", "dance_grpo"], ["mix_grpo", "g2rpo", "dance_grpo"])
    first = next(one for one in found if one.method == "g2rpo")
    assert first.gain.mean == pytest.approx(0.2 + 2 * 0.3) and first.gain.low < 0.4
    assert first.above["dance_grpo"].values == pytest.approx((0.18, 0.2, 0.22))
    assert [(one.method, other) for one in found for other, gained in one.above.items() if tone(gained) == "up"] == [
        ("g2rpo", "dance_grpo")
    ]
    assert standings(rows[:-1], ["mix_grpo"], []) == []


def test_missing_scores_are_listed_with_their_commonest_reason(results):
    results = results.assign(checkpoint="final", steps=10, reason=None)
    assert missing_table(results) == []
    lacking = results.index[(results.method == "g2rpo") & (results.reward == "hps")][:3]
    results.loc[lacking, "score"], results.loc[lacking, "reason"] = np.nan, ["no answer", "refused", "no answer"]
    key = {"method": "g2rpo", "seed": 1, "checkpoint": "final", "steps": 10, "reward": "hps"}
    assert missing_table(results) == [key | {"missing": 3, "scores": 50, "reason": "no answer"}]


def test_missing_scores_are_counted_and_never_zero(results):
    results.loc[results.index[(results.method == "g2rpo") & (results.reward == "hps")][:3], "score"] = np.nan
    cell = main_table(results, ("base", 0), RUNS, ["hps"], TRAINED_ON)[1].cells["hps"]
    assert (cell.missing, cell.difference.pairs) == (3, 47)
    assert cell.difference.mean == pytest.approx(0.1)


def test_methods_are_compared_with_each_other_seed_by_seed(results):
    pairs = method_pairs(results, RUNS, ["hps", "clip_score"], TRAINED_ON)
    assert [(pair.first, pair.second, pair.seed, pair.reward) for pair in pairs] == [
        ("g2rpo", "dance_grpo", 1, reward) for reward in (None, "hps", "clip_score")
    ]
    assert [pair.difference.mean for pair in pairs] == pytest.approx([0.6, 0.3, 0.0])
    assert pairs[1].difference.win_rate == 1


def test_methods_trained_on_other_rewards_share_no_sum(results):
    trained_on = {"g2rpo": WEIGHTS, "dance_grpo": {"hps": 1.0}}
    assert [pair.reward for pair in method_pairs(results, RUNS, ["hps"], trained_on)] == ["hps"]
    rows = main_table(results, ("base", 0), RUNS, ["hps"], trained_on)
    assert [row.trained.mean for row in rows[1:]] == pytest.approx([0.2, -0.2])


def test_the_win_matrix_is_antisymmetric(results):
    ((none, one), (other, _)) = win_rates(results, RUNS, WEIGHTS)
    assert none is None
    assert (one.win_rate, other.win_rate) == (1, 0)
    assert one.mean == pytest.approx(-other.mean) == pytest.approx(0.6)


def test_styles_are_compared_within_themselves(results):
    rows = style_table(results, ("base", 0), RUNS, TRAINED_ON)
    assert [(row.method, row.style, row.prompts) for row in rows] == [
        (method, style, prompts) for style, prompts in (("one", 40), ("two", 10)) for method in ("g2rpo", "dance_grpo")
    ]
    assert [row.trained.mean for row in rows] == pytest.approx([0.2, -0.4, 0.2, -0.4])


def test_the_worst_cases_are_those_that_fell_most(results):
    chosen = (results.method == "g2rpo") & (results.prompt_id == "p7") & (results.reward == "hps")
    results.loc[chosen, "score"] -= 1
    worst = most_changed(results, ("g2rpo", 1), ("base", 0), WEIGHTS, 3)
    assert len(worst) == 3 and worst[0] == ("p7", pytest.approx(0.2 - 2.0))
    assert [drop for _, drop in worst[1:]] == pytest.approx([0.2, 0.2])


def test_the_summary_says_what_the_intervals_say(results):
    rows, pairs = main_table(results, ("base", 0), RUNS, ["hps"], TRAINED_ON), method_pairs(results, RUNS, ["hps"], TRAINED_ON)
    above, below, between = summary(rows, pairs, METHOD_LABELS)
    assert above.startswith("G²RPO is above the base with 1 of 1 seeds: +0.200 [+0.200, +0.200]")
    assert below.startswith("DanceGRPO is below the base with 1 of 1 seeds: ")
    assert between.startswith("G²RPO is above DanceGRPO with 1 of 1 seeds: ")
    nothing = difference(results, ("g2rpo", 1), ("g2rpo", 1), {"hps": 1.0})
    assert tone(nothing) == "" and tone(None) == ""


def test_a_chart_has_a_line_for_every_run_and_the_same_bytes_every_time():
    records = pd.DataFrame({"iteration": [0, 1, 2], "evaluations": [0, 10, 20], "heldout_hps": [0.1, 0.2, 0.3]})
    runs = {("g2rpo", 1): records, ("g2rpo", 2): records, ("dance_grpo", 1): records}
    arguments = (
        {"heldout_hps": "HPS"},
        {"iteration": "iteration", "evaluations": "evaluations"},
        {"g2rpo": "G²RPO", "dance_grpo": "Dance"},
    )
    svg = curves(runs, *arguments)
    assert svg == curves(runs, *arguments)
    assert svg.startswith("<svg") and svg.rstrip().endswith("</svg>")
    for label in ("G²RPO, seed 1", "G²RPO, seed 2", "Dance, seed 1"):
        assert svg.count(label) >= 1


def test_a_chart_of_many_runs_names_a_method_once_and_leaves_out_what_a_run_did_not_measure():
    records = pd.DataFrame({"iteration": [0, 1], "heldout_hps": [0.1, 0.2], "heldout_verifier": [0.4, 0.5]})
    runs = {(method, seed): records for method in ("g2rpo", "dance_grpo", "mix_grpo") for seed in (1, 2, 3)}
    columns = {"heldout_hps": "HPS", "heldout_verifier": "Verifier"}
    whole = curves(runs, columns, {"iteration": "iteration"}, METHOD_LABELS)
    assert whole.count(">DanceGRPO<") == 1 and "seed 1" not in whole
    runs["mix_grpo", 3] = records.drop(columns="heldout_verifier")
    assert curves(runs, columns, {"iteration": "iteration"}, METHOD_LABELS).count("<path") < whole.count("<path")


@pytest.mark.parametrize(
    "name, method, steps, found",
    [
        ("g2rpo", None, [10], [(10, "Table 1, 50 steps", 0.376)]),
        ("g2rpo", None, [10, 50], [(10, "Table 4, 10 steps", 0.378), (50, "Table 1, 50 steps", 0.376)]),
        ("g2rpo", None, [20, 30], [(20, "Table 4, 20 steps", 0.376), (20, "Table 1, 50 steps", 0.376)]),
        ("cheaper", "g2rpo", [10], [(10, "Table 1, 50 steps", 0.376)]),  # an entry of that method is compared with its row
        ("lambda_1", "g2rpo", [10], [(10, "Table 2, 50 steps", 0.372)]),  # one that the paper names itself with its own alone
        ("flow_grpo", None, [10], []),
    ],
)
def test_the_papers_number_stands_beside_the_run_that_it_belongs_to(results, name, method, steps, found):
    results = results[results.method.isin(["base", "g2rpo"])].replace({"method": {"g2rpo": name}})
    trained_on = {name: {"hps": 1.0, "clip_score": 1.0}}
    variants = []
    for shift in steps:
        shifted = results.assign(score=results.score + shift)
        variants.append(("final", shift, main_table(shifted, ("base", 0), [(name, 1)], ["hps"], trained_on)))
    methods = {name: SimpleNamespace(method=method)}
    settings = SimpleNamespace(evaluation=SimpleNamespace(steps=steps, rewards=["hps"]), methods=methods)
    lines = [line for line in paper_rows(variants, settings, trained_on) if line["row"].trained]
    ours = {rows[1].cells["hps"].mean: number for _, number, rows in variants}
    told = [(ours[line["pairs"][0][0]], line["table"], line["pairs"][0][1]) for line in lines]
    assert sorted(told) == sorted(found)
