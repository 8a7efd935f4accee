import pandas as pd

from g2rpo_core.algorithm.methods import LABELS
from g2rpo_core.reporting.charts import curves, svg

RECORDS = pd.DataFrame(
    {"iteration": [0, 1, 2], "num_forward_evals": [0, 10, 20], "heldout_hps": [0.1, 0.2, 0.3]}
)
COLUMNS = {"heldout_hps": "HPS", "heldout_verifier": "Verifier"}
AXES = {"iteration": "iterations", "num_forward_evals": "forward evaluations"}


def test_curves_hold_every_run_at_every_axis_and_are_the_same_every_time():
    runs = {("g2rpo", 1): RECORDS, ("g2rpo", 2): RECORDS, ("dance_grpo", 1): RECORDS}
    spec = curves(runs, COLUMNS, AXES, LABELS)
    assert spec == curves(runs, COLUMNS, AXES, LABELS)
    told = {
        (row["method"], row["seed"], row["iterations"], row["forward evaluations"], row["value"])
        for panel in spec["concat"]
        for row in panel["data"]["values"]
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
