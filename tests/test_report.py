import numpy as np
import pandas as pd
import pytest

from g2rpo_core.charts import curves
from g2rpo_core.report import difference, main_table, method_pairs, summary, tone

RUNS = [("g2rpo", 1), ("dance_grpo", 1)]
WEIGHTS = {"hps": 2.0, "clip_score": 1.0}


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
                    {"method": method, "seed": seed, "prompt_id": np.array(prompts)[order], "reward": reward, "score": scores}
                )
            )
    return pd.concat(parts, ignore_index=True)


def test_differences_are_paired_by_prompt_and_the_base_comes_first(results):
    rows = main_table(results, ("base", 0), RUNS, ["hps", "clip_score"], WEIGHTS)
    assert [row.method for row in rows] == ["base", "g2rpo", "dance_grpo"]
    assert rows[0].cells["hps"].difference is None
    for row, shift in zip(rows[1:], (0.1, -0.2)):
        found = row.cells["hps"].difference
        assert (found.mean, found.low, found.high) == pytest.approx((shift, shift, shift))
        assert row.trained.mean == pytest.approx(2 * shift)
        assert row.cells["clip_score"].difference.mean == pytest.approx(0)


def test_missing_scores_are_counted_and_never_zero(results):
    results.loc[results.index[(results.method == "g2rpo") & (results.reward == "hps")][:3], "score"] = np.nan
    cell = main_table(results, ("base", 0), RUNS, ["hps"], WEIGHTS)[1].cells["hps"]
    assert (cell.missing, cell.difference.pairs) == (3, 47)
    assert cell.difference.mean == pytest.approx(0.1)


def test_methods_are_compared_with_each_other_seed_by_seed(results):
    pairs = method_pairs(results, RUNS, ["hps", "clip_score"], WEIGHTS)
    assert [(pair.first, pair.second, pair.seed, pair.reward) for pair in pairs] == [
        ("g2rpo", "dance_grpo", 1, reward) for reward in (None, "hps", "clip_score")
    ]
    assert [pair.difference.mean for pair in pairs] == pytest.approx([0.6, 0.3, 0.0])
    assert pairs[1].difference.win_rate == 1


def test_the_summary_says_what_the_intervals_say(results):
    rows, pairs = main_table(results, ("base", 0), RUNS, ["hps"], WEIGHTS), method_pairs(results, RUNS, ["hps"], WEIGHTS)
    above, below, between = summary(rows, pairs)
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
