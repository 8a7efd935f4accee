import pandas as pd

from g2rpo_core.algorithm.methods import LABELS
from g2rpo_core.config.comparisons import TRAINING
from g2rpo_core.reporting.charts import curves, forest, library, svg
from g2rpo_core.reporting.over_seeds import over_seeds
from g2rpo_core.reporting.statistics import spread
from g2rpo_core.reporting.tables import judged

RECORDS = pd.DataFrame(
    {"iteration": [0, 1, 2], "num_forward_evals": [0, 10, 20], "heldout_hps": [0.1, 0.2, 0.3]}
)
COLUMNS = {"heldout_hps": "HPS", "heldout_verifier": "Verifier"}
AXES = {"iteration": "iterations", "num_forward_evals": "forward evaluations"}


def points(spec: dict) -> list[dict]:
    return (
        [row for table in spec["datasets"].values() for row in table]
        if "datasets" in spec
        else values(spec)
    )


def values(part) -> list[dict]:
    """The data of every panel, each table once."""
    found = []
    if isinstance(part, dict):
        if (
            "values" in part
            and isinstance(part["values"], list)
            and part["values"]
            and isinstance(part["values"][0], dict)
        ):
            return part["values"]
        for each in part.values():
            found += values(each)
    if isinstance(part, list):
        for each in part:
            found += values(each)
    return found


def drawn(*means: float) -> list[dict]:
    """The points of one method's forest: these means of its seeds, with intervals of ± 0.1."""
    rows = [
        {"method": "g2rpo", "reward": TRAINING, "seed": seed, "value": 0.0}
        | {"difference": mean, "low": mean - 0.1, "high": mean + 0.1}
        for seed, mean in enumerate(means, 1)
    ]
    lines = judged(pd.DataFrame(rows))
    return points(forest(lines, over_seeds(lines), LABELS, {TRAINING: "training reward"}))


def test_curves_hold_every_run_at_every_axis_and_are_the_same_every_time():
    runs = {("g2rpo", 1): RECORDS, ("g2rpo", 2): RECORDS, ("dance_grpo", 1): RECORDS}
    spec = curves(runs, COLUMNS, AXES, LABELS)
    assert spec == curves(runs, COLUMNS, AXES, LABELS)
    told = {
        (row["method"], row["seed"], row["iterations"], row["forward evaluations"], row["value"])
        for row in points(spec)
    }
    expected = {
        (LABELS[method], str(seed), *row)
        for method, seed in runs
        for row in RECORDS[["iteration", "num_forward_evals", "heldout_hps"]].itertuples(
            index=False, name=None
        )
    }
    assert told == expected  # no run measured the verifier
    assert svg(spec) == svg(spec) and svg(spec).startswith("<svg")


def test_seeds_with_other_forward_evaluations_share_one_place_an_iteration():
    """The cost of a random window differs by seed; an iteration's mean still has one x."""
    dear = RECORDS.assign(num_forward_evals=RECORDS.num_forward_evals * 3)
    spec = curves({("g2rpo", 1): RECORDS, ("g2rpo", 2): dear}, COLUMNS, AXES, LABELS)
    assert {
        (row["seed"], row["iterations"], row["forward evaluations"]) for row in points(spec)
    } == {(seed, iteration, 20 * iteration) for seed in "12" for iteration in range(3)}


def test_a_forest_has_intervals_over_three_or_more_seeds_and_else_of_each_seed():
    few = drawn(0.1, 0.3)
    assert [(row["low"], row["high"]) for row in few if "low" in row][:2] == [
        (0.0, 0.2),
        (0.3 - 0.1, 0.3 + 0.1),
    ]
    many = drawn(0.1, 0.2, 0.3)
    expected = spread([0.1, 0.2, 0.3])
    assert (expected["low"], expected["high"]) in [
        (row["low"], row["high"]) for row in many if "low" in row and "seed" not in row
    ]
    assert sorted(row["gain"] for row in many if "seed" in row) == [0.1, 0.2, 0.3]


def test_what_nothing_is_known_of_has_no_chart_and_an_empty_image():
    assert (
        forest(pd.DataFrame(), pd.DataFrame(), LABELS, {}) is None
        and curves({}, COLUMNS, AXES, LABELS) is None
    )
    assert svg(None).startswith("<svg")


def test_the_library_of_the_page_ends_no_script_element_and_asks_nobody():
    text = library()
    assert "vegaEmbed" in text and "</script" not in text and "https://cdn" not in text
