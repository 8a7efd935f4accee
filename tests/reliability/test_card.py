"""The card of exported weights: what it says is of these weights, or it says nothing."""

import json

import pytest

from g2rpo_core.cli.main import main
from g2rpo_core.foundation.runs import hash_of_folder
from tests.fixtures.commands import run_here

pytestmark = pytest.mark.pipeline
NOT_EVALUATED = "No scores: they were not evaluated: run `dvc repro evaluate@g2rpo-1`"


@pytest.fixture
def card(project):
    """card(run, ...) -> the card of the exported run, and the export's folder."""
    numbers = iter(range(99))

    def of(run, *words):
        out = project / f"out-{next(numbers)}"
        done = run_here(
            main, "export", run, "--form", "diffusers", "--out", out, *words, folder=project
        )
        assert done.returncode == 0, done.stderr
        assert not list(project.glob(".out*"))
        return (out / "README.md").read_text(), out

    return of


def test_an_evaluated_run_has_its_own_scores_pictures_and_settings(card, project):
    text, out = card("g2rpo-1")
    scores = json.loads((project / "reports" / "metrics" / "g2rpo-1.json").read_text())
    base = json.loads((project / "reports" / "metrics" / "base-0.json").read_text())
    assert (
        f"| {base['verifier']:.4f} | {scores['verifier']:.4f} |" in text
        and "| iterations | 2 |" in text
    )
    assert len(list((out / "pictures").iterdir())) == 8 and "No scores" not in text


def test_a_run_that_was_trained_again_was_not_evaluated(card, project):
    run = project / "runs" / "small" / "g2rpo-1"
    dep = f"{{path: runs/small/g2rpo-1, md5: {hash_of_folder(run)}}}"
    (project / "dvc.lock").write_text(
        f"stages: {{evaluate@g2rpo-1: {{deps: [{dep}], outs: []}}}}\n"
    )
    assert "No scores" not in card("g2rpo-1")[0]
    (run / "records.parquet").write_bytes((run / "records.parquet").read_bytes() + b"PAR1")
    assert NOT_EVALUATED in card("g2rpo-1")[0]
