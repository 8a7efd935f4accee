import pandas as pd

from g2rpo_core.algorithm.methods import LABELS
from g2rpo_core.reporting.charts import curves, library, svg

RECORDS = pd.DataFrame(
    {"iteration": [0, 1, 2], "num_forward_evals": [0, 10, 20], "heldout_hps": [0.1, 0.2, 0.3]}
)
COLUMNS = {"heldout_hps": "HPS", "heldout_verifier": "Verifier"}
AXES = {"iteration": "iterations", "num_forward_evals": "forward evaluations"}


def points(spec: dict) -> list[dict]:
    """Return the data of every panel."""
    return [row for panel in spec["concat"] for row in panel["data"]["values"]]


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


def test_the_library_of_the_page_ends_no_script_element_and_asks_nobody():
    text = library()
    assert "vegaEmbed" in text and "</script" not in text and "https://cdn" not in text
