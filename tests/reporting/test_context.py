from pathlib import Path
from types import SimpleNamespace

import pytest

from g2rpo_core.foundation.errors import UserError
from g2rpo_core.reporting.context import headline
from g2rpo_core.reporting.measured import read_seconds
from g2rpo_core.reporting.tables import main_table
from g2rpo_core.reporting.verdict import PAPER, paper_rows


@pytest.mark.parametrize(
    "name, method, steps, expected",
    [
        ("g2rpo", "g2rpo", [10], [(10, "Table 1, 50 steps", 0.376)]),
        ("g2rpo", "g2rpo", [10, 50], [(10, "Table 4, 10 steps", 0.378), (50, "Table 1, 50 steps", 0.376)]),
        ("g2rpo", "g2rpo", [20, 30], [(20, "Table 4, 20 steps", 0.376), (20, "Table 1, 50 steps", 0.376)]),
        ("cheaper", "g2rpo", [10], [(10, "Table 1, 50 steps", 0.376)]),  # an entry of that method is compared with its row
        ("lambda_1", "g2rpo", [10], [(10, "Table 2, 50 steps", 0.372)]),  # one that the paper names itself with its own alone
        ("flow_grpo", "flow_grpo", [10], []),
    ],
)
def test_the_papers_number_stands_beside_the_run_that_it_belongs_to(results, name, method, steps, expected):
    results = results[results.method.isin(["base", "g2rpo"])].replace({"method": {"g2rpo": name}})
    trained_on = {name: {"hps": 1.0, "clip_score": 1.0}}
    variants = []
    for shift in steps:
        shifted = results.assign(score=results.score + shift)
        variants.append(("final", shift, main_table(shifted, ("base", 0), [(name, 1)], ["hps"], trained_on)))
    theirs = {section: SimpleNamespace(**values) for section, values in PAPER["settings"].items()}
    entries = {name: SimpleNamespace(published=method, sampling=theirs["sampling"], training=theirs["training"])}
    evaluation = SimpleNamespace(**PAPER["settings"]["evaluation"], steps=steps, rewards=["hps"])
    settings = SimpleNamespace(evaluation=evaluation, models=theirs["models"], prompts=theirs["prompts"])
    lines = [line for line in paper_rows(variants, settings, entries, trained_on) if line["row"].trained]
    ours = {rows[1].cells["hps"].mean: number for _, number, rows in variants}
    compared = [(ours[line["pairs"][0][0]], line["table"], line["pairs"][0][1]) for line in lines]
    assert sorted(compared) == sorted(expected)
    theirs["training"].iterations = 200
    for line in paper_rows(variants, settings, entries, trained_on):
        assert ("training.iterations 200 (the paper's 300)" in line["unlike"]) == bool(line["row"].trained)


def test_seconds_are_means_over_seeds_and_left_out_where_a_run_was_made_elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a-1.json").write_text('{"seconds": {"0": 0.0, "2": 3.0, "10": 20.0}}')
    (tmp_path / "a-2.json").write_text('{"seconds": {"0": 0.0, "2": 4.0}}')
    (tmp_path / "b-1.json").write_text('{"seconds": {"0": 0.0}}')
    names, seeds, labels = ["a", "b"], [1, 2], {"a": "A", "b": "B"}
    assert read_seconds(names, seeds, [tmp_path], labels) == {"A": {"0": 0.0, "2": 3.5}}
    (tmp_path / "base-1").mkdir()
    for seed in seeds:
        (tmp_path / "base-1" / f"a-{seed}.json").write_text('{"seconds": {"0": 0.0, "2": 1.5}}')
    assert read_seconds(names, seeds, [tmp_path, tmp_path / "base-1"], labels) == {"A": {"0": 0.0, "2": 2.5}}
    (tmp_path / "b-2.json").write_text('{"seconds": [1, 2]}')
    Path("reports").mkdir()
    Path("reports", "timings").symlink_to(tmp_path)
    with pytest.raises(UserError, match="b-2.json: holds no seconds of iterations; delete it"):
        read_seconds(names, seeds, [Path("reports", "timings")], labels)


def test_the_headline_has_means_gains_in_the_training_reward_and_comparisons(results):
    trained_on = {"g2rpo": {"hps": 2.0, "clip_score": 1.0}}
    rows = main_table(results, ("base", 0), [("g2rpo", 1)], ["hps", "clip_score"], trained_on)
    others = ("image_stats", "styles", "variants", "pairs", "by_method", "standings", "variant_gains", "comparisons")
    found = headline({"rows": rows} | dict.fromkeys(others, ()))
    base, run, comparisons = found["base-0"], found["g2rpo-1"], found["comparisons"]
    assert list(base) == ["hps", "clip_score"] and run["hps"] == pytest.approx(base["hps"] + 0.1)
    assert run["training_reward_gain"] == pytest.approx(0.2) and run["training_reward_gain_standard_errors"] > 100
    assert [(one["of"], one["against"], one["reward"]) for one in comparisons] == [
        ("g2rpo-1", "base-0", reward) for reward in ("training", "hps", "clip_score")
    ]
    assert comparisons[0]["low"] <= comparisons[0]["difference"] == run["training_reward_gain"] <= comparisons[0]["high"]
