from types import SimpleNamespace

import pandas as pd
import pytest

from g2rpo_core.reporting.measured import read_seconds
from g2rpo_core.reporting.tables import by_run, judged, lines_of
from g2rpo_core.reporting.verdict import PAPER, lead_of, paper_rows
from tests.reporting.test_tables import beside_base


@pytest.mark.parametrize(
    "name, method, steps, expected",
    [
        (
            "g2rpo",
            "g2rpo",
            [10, 50],
            [(10, "Table 4, 10 steps", 0.378), (50, "Table 1, 50 steps", 0.376)],
        ),
        (
            "cheaper",
            "g2rpo",
            [10],
            [(10, "Table 1, 50 steps", 0.376)],
        ),
        (
            "lambda_1",
            "g2rpo",
            [10],
            [(10, "Table 2, 50 steps", 0.372)],
        ),
        ("flow_grpo", "flow_grpo", [10], []),
    ],
)
def test_the_papers_number_stands_beside_the_run_that_it_belongs_to(
    results, name, method, steps, expected
):
    results = results[results.method.isin(["base", "g2rpo"])].replace({"method": {"g2rpo": name}})
    trained_on = {name: {"hps": 1.0, "clip_score": 1.0}}
    variants = {
        ("final", shift): beside_base(
            results.assign(score=results.score + shift), [(name, 1)], ["hps"], trained_on
        )
        for shift in steps
    }
    theirs = {section: SimpleNamespace(**values) for section, values in PAPER["settings"].items()}
    entry = SimpleNamespace(
        published=method, sampling=theirs["sampling"], training=theirs["training"]
    )
    theirs["evaluation"] = SimpleNamespace(
        **PAPER["settings"]["evaluation"], steps=steps, rewards=["hps"]
    )
    compared = SimpleNamespace(
        settings=SimpleNamespace(**theirs), entries={name: entry}, published=(), weights=trained_on
    )
    ours = {by_run(lines)[name, 1]["hps"].value: number for (_, number), lines in variants.items()}
    rows = [row for row in paper_rows(compared, variants) if row["method"] == name]
    beside = [(ours[row["pairs"][0][0]], row["table"], row["pairs"][0][1]) for row in rows]
    assert sorted(beside) == sorted(expected)


def test_seconds_are_means_over_seeds_and_left_out_where_a_run_was_made_elsewhere(
    tmp_path,
):
    (tmp_path / "a-1.json").write_text('{"seconds": {"0": 0.0, "2": 3.0, "10": 20.0}}')
    (tmp_path / "a-2.json").write_text('{"seconds": {"0": 0.0, "2": 4.0}}')
    (tmp_path / "b-1.json").write_text('{"seconds": {"0": 0.0}}')
    assert read_seconds(["a", "b"], [1, 2], [tmp_path], {"a": "A", "b": "B"}) == {
        "A": {"0": 0.0, "2": 3.5}
    }


def test_a_lead_counts_the_seeds_that_show_it_whichever_method_a_pair_names_first():
    seeds = {"difference": [-0.3, -0.1], "low": [-0.4, -0.25], "high": [-0.2, 0.05]}
    pairs = lines_of(judged(pd.DataFrame(seeds).assign(method="a", against="b")))
    lead = {"first": "b", "second": "a", "by": 0.2, "ahead": 1, "seeds": 2}
    assert lead_of(["b", "a"], pairs) == lead | {"half_width": pytest.approx(0.15)}
    assert lead_of(["a", "b"], pairs)["ahead"] == 0 and lead_of(["b", "c"], pairs) is None
