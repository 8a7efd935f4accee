import re
from pathlib import Path

import pytest

from g2rpo_core.reporting.conclusions import comparisons
from g2rpo_core.reporting.context import build_context
from g2rpo_core.reporting.recorded import read_measured
from g2rpo_core.reporting.render import render
from tests.conftest import ROOT
from tests.reporting.test_recorded import compared_in

INTERVAL = re.compile(r"[+-]\d+\.\d{4} \[[+-]\d+\.\d{4}, [+-]\d+\.\d{4}\]")


@pytest.mark.parametrize("name", ["steps", "verdict"])  # other numbers of steps, and comparisons named beforehand
def test_every_interval_of_a_page_is_a_comparison_and_each_has_one_name(name, monkeypatch):
    monkeypatch.chdir(ROOT)
    compared, home = compared_in(name), Path("studies", name)
    context = build_context(compared, read_measured(compared, home / "results.parquet", home / "runs.txt"))
    entries = comparisons(context)
    shown = set(INTERVAL.findall(render(context | {"title": name, "about": ""})["report.md"]))
    assert len(shown) > 10
    assert shown <= {f"{one['difference']:+.4f} [{one['low']:+.4f}, {one['high']:+.4f}]" for one in entries}
    keys = [(one["of"], one["against"], one["reward"], one.get("on")) for one in entries]
    assert len(set(keys)) == len(keys)
    beforehand = [one for one in entries if "margin" in one]
    assert [(one["of"], one["against"], one["reward"], one["margin"]) for one in beforehand] == [
        (one.method, one.against, one.reward, one.margin) for one in compared.comparisons
    ]
