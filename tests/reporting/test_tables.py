from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from g2rpo_core.algorithm.methods import LABELS
from g2rpo_core.config.comparisons import Comparison
from g2rpo_core.reporting.tables import (
    compare_preregistered,
    difference,
    gains,
    main_table,
    method_pairs,
    missing_table,
    most_changed,
    pooled_difference,
    standings,
    style_table,
    tone,
    win_rates,
)
from g2rpo_core.reporting.verdict import summary, verdict

RUNS = [("g2rpo", 1), ("dance_grpo", 1)]
WEIGHTS = {"hps": 2.0, "clip_score": 1.0}
NAMES = {"hps": "HPS-v2.1", "clip_score": "CLIP Score"}
TRAINED_ON = {method: WEIGHTS for method, _ in RUNS}


def test_differences_are_paired_by_prompt_and_the_base_comes_first(results):
    rows = main_table(results, ("base", 0), RUNS, ["hps", "clip_score"], TRAINED_ON)
    assert [row.method for row in rows] == ["base", "g2rpo", "dance_grpo"]
    assert rows[0].cells["hps"].difference is None
    for row, shift in zip(rows[1:], (0.1, -0.2)):
        to_base = row.cells["hps"].difference
        assert (to_base.mean, to_base.low, to_base.high) == pytest.approx((shift, shift, shift))
        assert row.trained.mean == pytest.approx(2 * shift)
        assert row.cells["clip_score"].difference.mean == pytest.approx(0)


def test_seeds_are_values_of_their_own_and_two_say_nothing_of_a_spread(results):
    treated = results[results.method == "g2rpo"]
    runs = [("g2rpo", seed) for seed in range(1, 4)]
    several = [treated.assign(seed=seed, score=treated.score + 0.01 * seed * (treated.reward == "hps")) for seed in range(1, 4)]
    table = pd.concat([results[results.method == "base"], *several])
    rows = main_table(table, ("base", 0), runs, ["hps", "clip_score"], TRAINED_ON)
    (standing,) = standings(rows, ["g2rpo"], ["clip_score"])
    assert standing.method == "g2rpo" and standing.above == {}
    assert standing.gain.values == pytest.approx((0.22, 0.24, 0.26)) and standing.gain.mean == pytest.approx(0.24)
    assert standing.gain.high - standing.gain.mean == pytest.approx(4.302653 * 0.02 / 3**0.5)
    assert standing.held_out["clip_score"].mean == pytest.approx(0)
    assert standings(rows[:-1], ["g2rpo"], []) == []


def rows_of_seeds(results, shifts: dict[str, tuple[float, ...]]) -> list:
    """Rows of methods whose seeds are above the run of `results` by these shifts in the first reward."""
    base, treated = results[results.method == "base"], results[results.method == "g2rpo"]
    parts = [
        treated.assign(method=method, seed=seed, score=treated.score + shift * (treated.reward == "hps"))
        for method, values in shifts.items()
        for seed, shift in enumerate(values)
    ]
    runs = [(method, seed) for method, values in shifts.items() for seed in range(len(values))]
    return main_table(pd.concat([base, *parts]), ("base", 0), runs, ["hps"], {method: WEIGHTS for method in shifts})


def test_methods_are_ranked_over_seeds_and_compared_seed_by_seed(results):
    """Seeds differ by more than methods do: only paired by seed is a difference significant, and never that of the third, which changes sides."""
    shifts = {"g2rpo": (0.1, 0.3, 0.5), "dance_grpo": (0.0, 0.21, 0.39), "mix_grpo": (0.2, 0.1, 0.6)}
    rows = rows_of_seeds(results, shifts)
    ranked = standings(rows, list(shifts), [])
    assert [standing.method for standing in ranked] in (["g2rpo", "mix_grpo", "dance_grpo"], ["mix_grpo", "g2rpo", "dance_grpo"])
    first = next(standing for standing in ranked if standing.method == "g2rpo")
    assert first.gain.mean == pytest.approx(0.2 + 2 * 0.3) and first.gain.low < 0.4
    assert first.above["dance_grpo"].values == pytest.approx((0.18, 0.2, 0.22))
    significant = [(standing.method, other) for standing in ranked for other, gap in standing.above.items() if tone(gap) == "up"]
    assert significant == [("g2rpo", "dance_grpo")]
    assert standings(rows[:-1], ["mix_grpo"], []) == []


def test_comparisons_named_beforehand_share_one_confidence_and_hold_or_do_not(results):
    """Three of them at 95 % together are each at 98.33 %, where Student's t has 7.649 for three seeds."""
    rows = rows_of_seeds(results, {"g2rpo": (0.1, 0.3, 0.5), "dance_grpo": (0.0, 0.2, 0.45)})
    asked = [
        Comparison(method="g2rpo", against="dance_grpo"),
        Comparison(method="dance_grpo", against="g2rpo", reward="hps"),
        Comparison(method="dance_grpo", against="g2rpo", reward="hps", margin=0.25),
    ]
    above, below, within = compare_preregistered(rows, asked)
    assert above.difference.values == pytest.approx((0.1, 0.2, 0.2))  # hps counts twice in the training reward
    error = 0.1 / 3  # of its mean
    assert above.difference.high - above.difference.mean == pytest.approx(7.648 * error, rel=1e-3)
    assert below.difference.mean == pytest.approx(-0.25 / 3) and below.difference == within.difference
    assert [one.holds for one in (above, below, within)] == [False, False, True]
    (alone,) = compare_preregistered(rows, asked[:1])
    assert alone.holds and alone.difference.high - alone.difference.mean == pytest.approx(4.3027 * error, rel=1e-3)


def test_the_secondary_comparison_holds_only_with_the_primary(results):
    rows = rows_of_seeds(
        results,
        {
            "g2rpo": (0.30, 0.32, 0.31, 0.33),
            "dance_grpo": (0.1, 0.13, 0.1, 0.12),
            "mix_grpo": (0.3, 0.33, 0.3, 0.33),
            "flow_grpo": (0.28, 0.33, 0.27, 0.33),
        },
    )
    named = lambda role, against, **how: Comparison(method="g2rpo", against=against, role=role, **how)
    sound = [
        named("primary", "dance_grpo"),
        named("secondary", "dance_grpo", reward="hps"),
        named("other", "mix_grpo", level=0.05),
    ]
    primary, secondary, level = compare_preregistered(rows, sound)
    assert primary.holds and secondary.holds and level.holds
    low, high = stats.t.interval(0.95, 3, primary.difference.mean, stats.sem(primary.difference.values))
    assert (primary.difference.low, primary.difference.high) == pytest.approx((low, high)) and primary.holm == primary.p
    assert primary.exact == pytest.approx(2 / 2**4)
    # Level: two one-sided tests at 5 %, which are a 90 % interval within the margins
    low, high = stats.t.interval(0.90, 3, level.difference.mean, stats.sem(level.difference.values))
    assert (level.difference.low, level.difference.high) == pytest.approx((low, high)) and -0.05 < low and high < 0.05
    assert level.p < 0.05 and not compare_preregistered(rows, [named("other", "mix_grpo", level=0.001)])[0].holds
    for against, edge in (("mix_grpo", 0.05), ("flow_grpo", 0.02)):  # the mean is within, and outside
        tested = compare_preregistered(rows, [named("other", against, level=edge)])[0]
        sides = ((-edge, "greater"), (edge, "less"))
        p = max(stats.ttest_1samp(tested.difference.values, side, alternative=which).pvalue for side, which in sides)
        assert tested.p == pytest.approx(p) and tested.holds == (p < 0.05) == (edge == 0.05)
    # The primary fails: the secondary, which would hold by itself, does not count
    failed = [named("primary", "mix_grpo"), named("secondary", "dance_grpo")]
    assert [one.holds for one in compare_preregistered(rows, failed)] == [False, False]


def test_few_seeds_and_many_methods_have_one_variance(results):
    shifts = {name: (0.1, 0.2, 0.3) for name in ("g2rpo", "dance_grpo", "mix_grpo")}
    assert pooled_difference(rows_of_seeds(results, shifts), list(shifts)) is None
    rows = rows_of_seeds(results, shifts | {"flow_grpo": (0.1, 0.25, 0.3)})
    assert pooled_difference(rows, [*shifts, "flow_grpo"]) > 0


def test_missing_scores_are_listed_with_their_commonest_reason(results):
    results = results.assign(checkpoint="final", steps=10, reason=None)
    assert missing_table(results) == []
    lacking = results.index[(results.method == "g2rpo") & (results.reward == "hps")][:3]
    results.loc[lacking, "score"], results.loc[lacking, "reason"] = np.nan, ["no answer", "refused", "no answer"]
    key = {"method": "g2rpo", "seed": 1, "checkpoint": "final", "steps": 10, "reward": "hps"}
    assert missing_table(results) == [key | {"missing": 3, "scores": 50, "reason": "no answer"}]
    assert missing_table(results.assign(reason=None))[0]["reason"] == "unknown"


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


def test_methods_trained_on_other_rewards_share_no_training_reward(results):
    trained_on = {"g2rpo": WEIGHTS, "dance_grpo": {"hps": 1.0}}
    assert [pair.reward for pair in method_pairs(results, RUNS, ["hps"], trained_on)] == ["hps"]
    rows = main_table(results, ("base", 0), RUNS, ["hps"], trained_on)
    assert [row.trained.mean for row in rows[1:]] == pytest.approx([0.2, -0.2])


def test_the_win_matrix_is_antisymmetric(results):
    ((diagonal, upper), (lower, _)) = win_rates(results, RUNS, WEIGHTS)
    assert diagonal is None
    assert (upper.win_rate, lower.win_rate) == (1, 0)
    assert upper.mean == pytest.approx(-lower.mean) == pytest.approx(0.6)


def test_styles_are_compared_within_themselves(results):
    rows = style_table(results, ("base", 0), RUNS, TRAINED_ON)
    assert [(row.method, row.style, row.prompts) for row in rows] == [
        (method, style, prompts) for style, prompts in (("one", 40), ("two", 10)) for method in ("g2rpo", "dance_grpo")
    ]
    assert [row.trained.mean for row in rows] == pytest.approx([0.2, -0.4, 0.2, -0.4])
    # A style of one prompt that both have says nothing of this run
    two = results[(results["style"] == "two") & (results.method == "g2rpo")]
    results.loc[two.index[two.prompt_id != two.prompt_id.iloc[0]], "score"] = np.nan
    assert [(row.method, row.style) for row in style_table(results, ("base", 0), RUNS, TRAINED_ON)] == [
        ("g2rpo", "one"), ("dance_grpo", "one"), ("dance_grpo", "two")
    ]  # fmt: skip


def test_the_worst_cases_are_those_that_fell_most(results):
    chosen = (results.method == "g2rpo") & (results.prompt_id == "p7") & (results.reward == "hps")
    results.loc[chosen, "score"] -= 1
    worst = most_changed(results, ("g2rpo", 1), ("base", 0), WEIGHTS, 3)
    assert len(worst) == 3 and worst[0] == ("p7", pytest.approx(0.2 - 2.0))
    assert [drop for _, drop in worst[1:]] == pytest.approx([0.2, 0.2])


def test_the_summary_says_what_the_intervals_say(results):
    rows, pairs = main_table(results, ("base", 0), RUNS, ["hps"], TRAINED_ON), method_pairs(results, RUNS, ["hps"], TRAINED_ON)
    above, below, between = summary(rows, pairs, LABELS)
    assert above.startswith("G²RPO is significantly above the base with 1 of 1 seeds: +0.200 [+0.200, +0.200]")
    assert below.startswith("DanceGRPO is significantly below the base with 1 of 1 seeds: ")
    assert between.startswith("G²RPO is significantly above DanceGRPO with 1 of 1 seeds: ")
    nothing = difference(results, ("g2rpo", 1), ("g2rpo", 1), {"hps": 1.0})
    assert tone(nothing) == "" and tone(None) == ""


def test_the_verdict_says_who_rose_who_is_ahead_and_what_follows(results):
    rows = main_table(results, ("base", 0), RUNS, ["hps", "clip_score"], TRAINED_ON)
    pairs = method_pairs(results, RUNS, [], TRAINED_ON)
    found = gains(rows, ["hps", "clip_score"])
    assert [(one.method, one.reward, one.tone) for one in found[:2]] == [("g2rpo", None, "up"), ("g2rpo", "hps", "up")]
    assert found[0].by == pytest.approx(0.2) and found[0].over_seeds is None
    sentence = verdict(found, [], pairs, LABELS, NAMES, ["hps"])
    assert sentence == (
        "G²RPO is ahead of DanceGRPO by 0.600, significantly on its one seed. "
        "G²RPO (+0.200) significantly raises the training reward; no significant rise: DanceGRPO (-0.400). Some held-out rewards fall: HPS-v2.1 of DanceGRPO."
    )
    alone = verdict(gains(rows[:2], ["hps"]), [], [], LABELS, NAMES, ["hps"])
    assert alone == "G²RPO raises the reward that it was trained on (+0.200). Held-out rewards rise too: HPS-v2.1."
    two = verdict(gains(rows[:2], ["hps", "clip_score"]), [], [], LABELS, NAMES, ["hps", "clip_score"])
    assert two.endswith(" Held-out rewards rise too: HPS-v2.1; not always significantly: CLIP Score.")


def test_a_lead_on_two_seeds_says_on_how_many_it_is_significant(results):
    """By the interval of each seed, as the table has it; and a rise counts if it is on every seed."""
    fallen = 0.35 * ((results.method == "g2rpo") & (results.reward == "hps"))
    second = results.assign(seed=2, score=results.score - fallen)
    table = pd.concat([results, second[second.method != "base"]])
    runs = [(method, seed) for method, _ in RUNS for seed in (1, 2)]
    found = gains(main_table(table, ("base", 0), runs, ["hps"], TRAINED_ON), ["hps"])
    pairs = method_pairs(table, runs, [], TRAINED_ON)
    assert verdict(found, [], pairs, LABELS, NAMES, []) == (
        "No lead is shown: G²RPO gains 0.250 more than DanceGRPO, significantly on 1 of 2 seeds. "
        "None of 2 methods significantly raises the training reward on every seed; not so: G²RPO (-0.150), DanceGRPO (-0.400)."
    )
    unclear = [replace(one, difference=replace(one.difference, low=-1.0)) for one in pairs]
    assert "more than DanceGRPO, significantly on none of 2 seeds." in verdict(found, [], unclear, LABELS, NAMES, [])
    sure = [replace(one, difference=replace(one.difference, mean=0.25, low=0.1, high=0.4)) for one in pairs]
    assert "G²RPO is ahead of DanceGRPO by 0.250, significantly on 2 of 2 seeds." in verdict(found, [], sure, LABELS, NAMES, [])


def test_from_three_seeds_on_the_verdict_is_that_of_the_interval_over_seeds(results):
    seeds = [results.assign(seed=results.seed.where(results.method == "base", seed)) for seed in (1, 2, 3)]
    shifts = {1: 0.0, 2: 0.02, 3: -0.02}
    table = pd.concat(
        part.assign(score=part.score + (part.method != "base") * shifts[seed]) for seed, part in zip(shifts, seeds)
    ).drop_duplicates(["method", "seed", "prompt_id", "reward"])
    runs = [(method, seed) for method, _ in RUNS for seed in shifts]
    rows = main_table(table, ("base", 0), runs, ["hps"], TRAINED_ON)
    found = gains(rows, ["hps"])
    assert found[0].over_seeds.mean == pytest.approx(0.2) and found[0].tone == "up"
    sentence = verdict(found, [(WEIGHTS, standings(rows, ["g2rpo", "dance_grpo"], []))], [], LABELS, NAMES, [])
    assert sentence.endswith("G²RPO gains most (+0.200) and is significantly above DanceGRPO.")


def test_a_difference_whose_interval_holds_zero_is_called_not_significant(results):
    noise = pd.Series(np.random.default_rng(1).normal(0, 0.1, len(results)))
    treated = results[results.method == "base"].assign(method="g2rpo", seed=1)
    table = pd.concat([results[results.method == "base"], treated.assign(score=treated.score + noise.loc[treated.index])])
    rows = main_table(table, ("base", 0), [("g2rpo", 1)], ["hps"], TRAINED_ON)
    (sentence,) = summary(rows, [], LABELS)
    assert tone(rows[1].trained) == "" and sentence.startswith(
        "G²RPO is not significantly different from the base with 1 of 1 seeds: "
    )
