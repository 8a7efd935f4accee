"""The card of exported weights: what it says is of these weights, or it says nothing."""

import json

import pytest

from g2rpo_core.cli.main import main
from g2rpo_core.foundation.runs import hash_of
from tests.fixtures.commands import run_here

pytestmark = pytest.mark.pipeline
NOT_EVALUATED = "No scores: they were not evaluated: run `dvc repro evaluate@g2rpo-1`"


def test_the_card_of_a_run_has_its_scores_until_it_is_trained_again(project):
    def card(number: int) -> str:
        out = project / f"out-{number}"
        words = ("export", "g2rpo-1", "--form", "diffusers", "--out", out)
        run_here(main, *words, folder=project)
        return (out / "README.md").read_text()

    run, metrics, text = project / "runs/small/g2rpo-1", project / "reports/metrics", card(0)
    names = [metrics / f"{name}.json" for name in ("base-0", "g2rpo-1")]
    base, scores = (json.loads(name.read_text())["verifier"] for name in names)
    assert f"| {base:.4f} | {scores:.4f} |" in text and "| iterations | 2 |" in text
    assert len(list((project / "out-0" / "pictures").iterdir())) == 8 and "No scores" not in text
    dep = f"{{path: runs/small/g2rpo-1, md5: {hash_of(run)}}}"
    lock = f"stages: {{evaluate@g2rpo-1: {{deps: [{dep}], outs: []}}}}\n"
    (project / "dvc.lock").write_text(lock)
    assert "No scores" not in card(1)
    records = run / "records.parquet"
    records.write_bytes(records.read_bytes() + b"PAR1")
    assert NOT_EVALUATED in card(2)
