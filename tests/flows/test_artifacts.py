import json

import pytest

from flows.artifacts import results
from tests.conftest import ROOT


def test_the_table_has_every_model_and_its_measured_means(tmp_path):
    table = results(ROOT)
    assert [row["model"] for row in table] == sorted(
        path.stem for path in (ROOT / "reports/metrics").glob("*.json")
    )
    measured = json.loads((ROOT / "reports/metrics/base-0.json").read_text())
    assert next(row for row in table if row["model"] == "base-0")["hps"] == pytest.approx(
        measured["hps"], abs=5e-5
    )
    assert results(tmp_path) == []
