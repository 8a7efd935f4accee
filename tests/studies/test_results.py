"""The row that decides each study, as its README has it, from its committed table."""

import numpy as np
import pandas as pd
import pytest
from ruamel.yaml import YAML
from scipy import stats

from tests.conftest import ROOT

NAMED = {
    file.parent.name: YAML(typ="safe").load(file)["comparisons"]
    for file in sorted((ROOT / "studies").glob("*/params.yaml"))
}
# Studies that ran and named comparisons; `words_equal` compares within runs, not their ends
DECIDED = [
    name
    for name, named in NAMED.items()
    if named and (ROOT / "studies" / name / "results.parquet").exists()
]


def gains(table: pd.DataFrame, method: str, reward: str) -> pd.Series:
    """The gain over the base of every seed, at the study's first number of steps."""
    rows = table[(table.part == "run") & (table.method == method) & (table.reward == reward)]
    return rows[rows.steps == rows.steps.iloc[0]].set_index("seed").difference


@pytest.mark.parametrize("study", DECIDED)
def test_the_primary_row_of_a_readme_follows_from_its_table(study):
    """The primary comparison with p and the exact p; without one the first, in a joint interval."""
    table, named = pd.read_parquet(ROOT / "studies" / study / "results.parquet"), NAMED[study]
    primary = next((one for one in named if one.get("role") == "primary"), None)
    confidence = 0.95 if primary else 1 - 0.05 / len(named)
    one = primary or named[0]
    reward = one.get("reward", "training")
    apart = gains(table, one["method"], reward) - gains(table, one["against"], reward)
    t = stats.ttest_1samp(apart, 0)
    low, high = t.confidence_interval(confidence)
    cells = [f"{apart.mean():+.3f} [{low:+.3f}, {high:+.3f}]".replace("-", "−")]
    if primary:
        signs = {"permutation_type": "samples", "n_resamples": 2 ** len(apart)}
        exact = stats.permutation_test((apart.to_numpy(),), np.mean, **signs)
        cells += [f"{t.pvalue:.2g}", f"{exact.pvalue:.2g}"]
    cells.append(f"{(apart > 0).sum()} of {len(apart)}")
    rows = (ROOT / "studies" / study / "README.md").read_text().splitlines()
    (row,) = [
        row for row in rows if row.startswith("| ") and all(f"| {cell} |" in row for cell in cells)
    ]
    assert not primary or "primary |" in row
