import numpy as np
import pandas as pd
import pytest

from g2rpo_core.charts import curves
from g2rpo_core.report import between_methods, main_table, trained_reward_difference


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
    rows = main_table(results, ["hps", "clip_score"])
    assert [row.method for row in rows] == ["base", "g2rpo", "dance_grpo"]
    assert rows[0].cells["hps"].difference is None
    for row, shift in zip(rows[1:], (0.1, -0.2)):
        difference = row.cells["hps"].difference
        assert (difference.mean, difference.low, difference.high) == pytest.approx((shift, shift, shift))
        assert row.cells["clip_score"].difference.mean == pytest.approx(0)


def test_missing_scores_are_counted_and_never_zero(results):
    results.loc[results.index[(results.method == "g2rpo") & (results.reward == "hps")][:3], "score"] = np.nan
    cell = next(row for row in main_table(results, ["hps"]) if row.method == "g2rpo").cells["hps"]
    assert (cell.missing, cell.difference.pairs) == (3, 47)
    assert cell.difference.mean == pytest.approx(0.1)


def test_the_trained_sum_is_weighted(results):
    assert trained_reward_difference(results, "g2rpo", 1, {"hps": 2.0, "clip_score": 1.0}).mean == pytest.approx(0.2)


def test_methods_are_compared_with_each_other(results):
    difference = between_methods(results, "g2rpo", "dance_grpo", 1, "hps")
    assert difference.mean == pytest.approx(0.3)
    assert difference.win_rate == 1


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
