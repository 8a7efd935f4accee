"""Numbers of docs/findings.md, computed from the committed tables of studies with pandas and scipy alone."""

import json

import pandas as pd
import pytest
from ruamel.yaml import YAML
from scipy import stats

from tests.conftest import ROOT

FINDINGS = (ROOT / "docs" / "findings.md").read_text()


def gains(study: str, method: str, reward: str) -> pd.Series:
    """The gain over the base of every seed."""
    table = pd.read_parquet(ROOT / "studies" / study / "results.parquet")
    rows = table[(table.part == "run") & (table.method == method) & (table.reward == reward)]
    return rows.set_index("seed").difference


def written(values: pd.Series, confidence: float) -> str:
    """The mean and its interval by Student's t, as the page has them."""
    low, high = stats.t.interval(confidence, len(values) - 1, values.mean(), stats.sem(values))
    return f"{values.mean():+.3f} [{low:+.3f}, {high:+.3f}]".replace("-", "−")


@pytest.mark.parametrize("study, holding", [("verdict", 2), ("marks", 1), ("marks_late", 4), ("families", 0)])
def test_preregistered_comparisons_follow_from_the_committed_table(study, holding):
    named = YAML(typ="safe").load(ROOT / "studies" / study / "params.yaml")["comparisons"]
    held = 0
    for one in named:
        reward = one.get("reward", "training")
        apart = gains(study, one["method"], reward) - gains(study, one["against"], reward)
        joint = written(apart, 1 - 0.05 / len(named))
        (row,) = (line for line in FINDINGS.splitlines() if f"| {joint} |" in line and line.endswith(f" of {len(apart)} |"))
        low = stats.t.interval(1 - 0.05 / len(named), len(apart) - 1, apart.mean(), stats.sem(apart))[0]
        holds = low > -one.get("margin", 0)
        assert ("**yes**" in row) == holds and row.endswith(f"| {int((apart > 0).sum())} of {len(apart)} |")
        held += holds
    assert held == holding


@pytest.mark.parametrize("study", ["verdict", "marks", "marks_late", "families"])
def test_a_methods_row_has_its_cost_seconds_and_gains(study):
    table = pd.read_parquet(ROOT / "studies" / study / "results.parquet")
    seconds = json.loads((ROOT / "studies" / study / "seconds.json").read_text())
    last = table[table.part == "training"].groupby(["method", "seed"]).last().reset_index()
    for method, runs in last.groupby("method"):
        costs = [f"{runs[name].mean():,.0f}" for name in ("iteration", "num_forward_evals", "num_transitions")]
        both = [written(gains(study, method, reward), 0.95) for reward in ("training", "verifier")]
        cells = [*costs, f"{seconds[method]['seconds']:.0f}", *both]
        assert " | ".join(cells) in FINDINGS, cells
