"""The card of exported weights: what it says is of these weights, or it says nothing."""

import json
import shutil

import pytest

from g2rpo_core.cli.main import main
from g2rpo_core.data.prompts import Prompt, load_prompts, write_prompts
from g2rpo_core.foundation.runs import hash_of_folder
from tests.fixtures.commands import refusal, run_here

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


def test_a_copy_of_a_run_has_neither_scores_nor_settings(card, project):
    shutil.copytree(project / "runs" / "small" / "g2rpo-1", project / "other" / "g2rpo-1")
    text, out = card("other/g2rpo-1")
    lacks = "No scores: these weights are no run of the checkout"
    assert lacks in text and "Not known here" in text
    assert "| iterations |" not in text and not (out / "pictures").exists()


def test_a_run_of_another_profile_has_no_scores_of_the_main_one(card, project):
    (project / "profiles" / "mini.yaml").write_text(
        "extends: small\ntraining: {iterations: 1, monitor: {every: 1}}\n"
    )
    for name in ("models", "runs"):
        shutil.copytree(project / name / "small", project / name / "mini")
    text, _ = card("g2rpo-1", "--profile", "mini")
    assert NOT_EVALUATED in text and "| iterations | 1 |" in text
    words = ("export", "runs/mini/g2rpo-1", "--form", "diffusers", "--out", "no")
    told = "error: export: runs/mini/g2rpo-1 is a run of profile mini: give --profile mini\n"
    assert refusal(main, *words, folder=project) == told
    assert not (project / "no").exists()


@pytest.mark.parametrize("known", [True, False])
def test_a_run_that_was_trained_again_was_not_evaluated(card, project, known):
    """By the hash in DVC's lock, or by time for a run that the lock does not know."""
    run = project / "runs" / "small" / "g2rpo-1"
    if known:
        dep = f"{{path: runs/small/g2rpo-1, md5: {hash_of_folder(run)}}}"
        (project / "dvc.lock").write_text(
            f"stages: {{evaluate@g2rpo-1: {{deps: [{dep}], outs: []}}}}\n"
        )
    assert "No scores" not in card("g2rpo-1")[0]
    (run / "records.parquet").write_bytes((run / "records.parquet").read_bytes() + b"PAR1")
    assert NOT_EVALUATED in card("g2rpo-1")[0]


def test_a_prompt_on_the_card_is_text(card, project):
    file = project / "prompts" / "small" / "test.parquet"
    text = "![x](https://evil.example/track.png) <img src=y onerror=z> | `a`"
    write_prompts(file, [Prompt(prompt.id, text, prompt.style) for prompt in load_prompts(file)])
    literal = r"| !\[x\](https://evil.example/track.png) \<img src=y onerror=z\> \| \`a\` |"
    assert literal in card("g2rpo-1")[0]
