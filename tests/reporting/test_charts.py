import re

import pandas as pd

from g2rpo_core.algorithm.methods import LABELS
from g2rpo_core.reporting.charts import curves, inline


def test_a_chart_has_a_line_for_every_run_and_the_same_bytes_every_time():
    records = pd.DataFrame({"iteration": [0, 1, 2], "num_forward_evals": [0, 10, 20], "heldout_hps": [0.1, 0.2, 0.3]})
    runs = {("g2rpo", 1): records, ("g2rpo", 2): records, ("dance_grpo", 1): records}
    arguments = (
        {"heldout_hps": "HPS"},
        {"iteration": "iteration", "num_forward_evals": "forward evaluations"},
        {"g2rpo": "G²RPO", "dance_grpo": "Dance"},
    )
    svg = curves(runs, *arguments)
    assert svg == curves(runs, *arguments)
    assert svg.startswith("<?xml") and svg.rstrip().endswith("</svg>")
    for label in ("G²RPO, seed 1", "G²RPO, seed 2", "Dance, seed 1"):
        assert svg.count(label) >= 1


def test_a_chart_of_many_runs_names_a_method_once_and_leaves_out_what_a_run_did_not_measure():
    records = pd.DataFrame({"iteration": [0, 1], "heldout_hps": [0.1, 0.2], "heldout_verifier": [0.4, 0.5]})
    runs = {(method, seed): records for method in ("g2rpo", "dance_grpo", "mix_grpo") for seed in (1, 2, 3)}
    columns = {"heldout_hps": "HPS", "heldout_verifier": "Verifier"}
    whole = curves(runs, columns, {"iteration": "iteration"}, LABELS)
    assert whole.count(">DanceGRPO<") == 1 and "seed 1" not in whole
    runs["mix_grpo", 3] = records.drop(columns="heldout_verifier")
    assert curves(runs, columns, {"iteration": "iteration"}, LABELS).count("<path") < whole.count("<path")


def test_a_chart_stands_in_a_page_as_an_element_that_takes_its_width():
    records = pd.DataFrame({"iteration": [0, 1], "heldout_hps": [0.1, 0.2]})
    svg = curves({("g2rpo", 1): records}, {"heldout_hps": "HPS"}, {"iteration": "iteration"}, LABELS)
    element = inline(svg)
    assert element.startswith("<svg") and element.rstrip().endswith("</svg>")
    opening, in_page = svg[svg.index("<svg") :].partition(">")[0], element.partition(">")[0]
    assert re.search(r'width="[\d.]+pt" height=', opening) and "width=" not in in_page and 'class="chart"' in in_page
    assert element.partition(">")[2] == svg[svg.index("<svg") :].partition(">")[2]
