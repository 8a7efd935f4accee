import numpy as np
import pandas as pd
import pytest
from scipy import stats

from g2rpo_core.config.comparisons import TRAINING, Comparison
from g2rpo_core.reporting.over_seeds import (
    compare_group,
    over_seeds,
    preregistered,
)
from g2rpo_core.reporting.tables import (
    by_run,
    changes,
    judged,
    lines_of,
    pair_lines,
    run_lines,
    tabulate,
)
from g2rpo_core.reporting.verdict import (
    worth_of_sum,
)

RUNS = [("g2rpo", 1), ("dance_grpo", 1)]
WEIGHTS = {"hps": 2.0, "clip_score": 1.0}


def beside_base(results, runs=RUNS, rewards=("hps", "clip_score"), trained_on=None) -> pd.DataFrame:
    """The lines of the base and of runs."""
    trained_on = trained_on or {method: WEIGHTS for method, _ in runs}
    bases = dict.fromkeys([("base", 0), *runs], ("base", 0))
    return judged(tabulate(run_lines(results, bases, rewards, (), trained_on), {}))


def shifted_seeds(results, shifts: dict[str, tuple[float, ...]]) -> pd.DataFrame:
    """Lines of methods whose seeds exceed the run of `results` by these shifts in reward 1."""
    base, treated = results[results.method == "base"], results[results.method == "g2rpo"]
    runs = {(name, seed): by for name, values in shifts.items() for seed, by in enumerate(values)}
    parts = [
        treated.assign(method=name, seed=seed, score=treated.score + by * (treated.reward == "hps"))
        for (name, seed), by in runs.items()
    ]
    return beside_base(pd.concat([base, *parts]), list(runs))


def test_seeds_are_values_of_their_own_and_two_say_nothing_of_a_spread(results):
    lines = shifted_seeds(results, {"g2rpo": (0.01, 0.02, 0.03)})
    group = compare_group(WEIGHTS, ["g2rpo"], [lines])
    (gain,) = group.ranked
    assert gain.method == "g2rpo" and group.above == {"g2rpo": {}} and gain.seeds == 3
    assert gain.by_seed == pytest.approx([0.22, 0.24, 0.26])
    assert gain.difference == pytest.approx(0.24)
    assert gain.high - gain.difference == pytest.approx(4.302653 * 0.02 / 3**0.5)
    two = lines[lines.seed < 2]
    assert compare_group(WEIGHTS, ["g2rpo"], [two]).ranked == []
    table = over_seeds(two[two.method != "base"]).set_index("reward")
    assert np.isnan(table.low[TRAINING]) and table.tone[TRAINING] == "up"  # on both seeds


def test_comparisons_named_beforehand_share_one_confidence_and_hold_or_do_not(results):
    """Three at 95 % together are each at 98.33 %: Student's t of three seeds is 7.649."""
    lines = shifted_seeds(results, {"g2rpo": (0.1, 0.3, 0.5), "dance_grpo": (0.0, 0.2, 0.45)})
    asked = [
        Comparison(method="g2rpo", against="dance_grpo"),
        Comparison(method="dance_grpo", against="g2rpo", reward="hps"),
        Comparison(method="dance_grpo", against="g2rpo", reward="hps", margin=0.25),
    ]
    above, below, within = lines_of(preregistered(lines, asked))
    assert above.difference == pytest.approx(0.5 / 3)  # hps counts twice in the training reward
    error = 0.1 / 3  # of its mean
    assert above.high - above.difference == pytest.approx(7.648 * error, rel=1e-3)
    assert below.difference == pytest.approx(-0.25 / 3)
    assert (below.low, below.high) == (within.low, within.high)
    assert [line.holds for line in (above, below, within)] == [False, False, True]
    (alone,) = lines_of(preregistered(lines, asked[:1]))
    assert alone.holds and alone.high - alone.difference == pytest.approx(4.3027 * error, rel=1e-3)
    assert len(preregistered(lines[lines.seed == 0], asked)) == 0  # one seed says nothing


def test_the_secondary_comparison_holds_only_with_the_primary(results):
    shifts = {
        "g2rpo": (0.30, 0.32, 0.31, 0.33),
        "dance_grpo": (0.1, 0.13, 0.1, 0.12),
        "mix_grpo": (0.3, 0.33, 0.3, 0.33),
        "flow_grpo": (0.28, 0.33, 0.27, 0.33),
    }
    lines = shifted_seeds(results, shifts)
    judge = lambda *comparisons: lines_of(preregistered(lines, comparisons))
    gaps = lambda other: 2 * (np.array(shifts["g2rpo"]) - shifts[other])
    named = lambda role, against, **how: Comparison(
        method="g2rpo", against=against, role=role, **how
    )
    primary, secondary, level = judge(
        named("primary", "dance_grpo"),
        named("secondary", "dance_grpo", reward="hps"),
        named("other", "mix_grpo", level=0.05),
    )
    assert primary.holds and secondary.holds and level.holds
    # Level: two one-sided tests at 5 %, which are a 90 % interval within the margins
    for line, against, share in ((primary, "dance_grpo", 0.95), (level, "mix_grpo", 0.90)):
        values = gaps(against)
        expected = stats.t.interval(share, 3, values.mean(), stats.sem(values))
        assert (line.low, line.high) == pytest.approx(expected)
    for against, edge in (
        ("mix_grpo", 0.05),
        ("flow_grpo", 0.02),
    ):  # the mean is within, and outside
        (tested,) = judge(named("other", against, level=edge))
        sides = ((-edge, "greater"), (edge, "less"))
        p = max(
            stats.ttest_1samp(gaps(against), side, alternative=how).pvalue for side, how in sides
        )
        assert tested.p == pytest.approx(p) and tested.holds == (p < 0.05) == (edge == 0.05)
    # The primary fails: the secondary, which would hold by itself, does not count
    failed = judge(named("primary", "mix_grpo"), named("secondary", "dance_grpo"))
    assert [line.holds for line in failed] == [False, False]


def test_the_exact_test_decides_where_a_comparison_names_it(results):
    """Six seeds of one sign have p = 2 / 64 by sign flips, whatever their spread."""
    shifts = {
        "g2rpo": (0.1, 0.2, 0.3, 0.1, 0.2, 0.9),
        "dance_grpo": (0.0,) * 6,
        "mix_grpo": (0.1, 0.2, 0.3, 0.1, 0.2, 0.91),
    }
    lines = shifted_seeds(results, shifts)
    named = lambda **how: Comparison(method="g2rpo", against="dance_grpo", **how)
    judge = lambda *comparisons: lines_of(preregistered(lines, comparisons))
    # Student's t does not hold, because one seed is far off
    (student,), (exact,) = (
        judge(named(role="primary", test=test)) for test in ("student", "exact")
    )
    assert student.p > 0.05 > exact.exact == exact.smallest == pytest.approx(2 / 64)
    assert not student.holds and exact.holds and exact.low == student.low < 0
    # A level has one-sided tests, and half of the p; as one of two others Holm doubles it
    level = Comparison(method="mix_grpo", against="g2rpo", level=0.1, role="other", test="exact")
    _, same = judge(named(role="primary"), level)
    assert same.exact == same.smallest == pytest.approx(1 / 64) and same.holds
    (_, first, second) = judge(named(role="primary"), named(test="exact"), named(test="exact"))
    assert first.exact_holm == second.exact_holm == pytest.approx(4 / 64) and not first.holds


def test_a_sum_of_tails_is_worth_what_their_correlations_leave():
    """Of two tails with correlation r: (1 + r) / 2 of the finest, at most 2 / (1 + r)."""
    for r in (0.2, 0.8, 1.0):
        assert worth_of_sum([r]) == pytest.approx(((1 + r) / 2, 2 / (1 + r)))
    assert worth_of_sum([0.0, 0.0]) == pytest.approx((1 / 3, 3))


def test_methods_trained_on_other_rewards_share_no_training_reward(results):
    trained_on = {"g2rpo": WEIGHTS, "dance_grpo": {"hps": 1.0}}
    pairs = pair_lines(results, RUNS, ["hps"], trained_on)
    assert [line["reward"] for line in pairs] == ["hps"]
    runs = by_run(beside_base(results, trained_on=trained_on))
    assert [runs[run][TRAINING].difference for run in RUNS] == pytest.approx([0.2, -0.2])


def test_changes_are_differences_of_the_weighted_sum_the_worst_first(results):
    fell = (results.method == "g2rpo") & (results.prompt_id == "p7") & (results.reward == "hps")
    results.loc[fell, "score"] -= 1
    found = changes(results, ("g2rpo", 1), ("base", 0), WEIGHTS)
    assert found.index[0] == "p7" and found.iloc[0] == pytest.approx(0.2 - 2.0)
    assert found.iloc[1:].tolist() == pytest.approx([0.2] * (len(found) - 1))


@pytest.mark.parametrize(
    "low, high, tone, known",
    [
        (0.1, 0.3, "up", True),
        (-0.3, -0.1, "down", True),
        (0.0, 0.0, "", True),
        (np.nan, np.nan, "", False),
    ],
)
def test_only_an_interval_that_is_known_and_excludes_zero_is_significant(low, high, tone, known):
    lines = judged(pd.DataFrame({"difference": [(low + high) / 2], "low": [low], "high": [high]}))
    assert (lines.tone[0], lines.known[0]) == (tone, known)
