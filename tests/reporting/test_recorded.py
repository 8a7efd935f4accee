from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from markupsafe import escape

from g2rpo_core.config import load_profile, load_study, profile_path
from g2rpo_core.config.comparisons import TRAINING
from g2rpo_core.reporting.charts import svg
from g2rpo_core.reporting.conclusions import headline
from g2rpo_core.reporting.measured import Compared, comparison_lines, learning_notes, prompt_lines
from g2rpo_core.reporting.page import Title, build_page
from g2rpo_core.reporting.recorded import read_measured, scores_in, write_results
from g2rpo_core.reporting.render import fill, forest_of, small
from g2rpo_core.reporting.tables import PARTS, by_run, missing_lines, tabulate, training_lines
from stages import report
from stages.report import SECTIONS
from tests.conftest import ROOT
from tests.fixtures.commands import run_here

ABOUT = {
    "prompts": 50,
    "prompt_counts": "50 prompts",
    "models": [["vae", "loss 0.1"]],
    "versions": "Python 3",
    "hashes": [],
}


def compared_in(name: str) -> Compared:
    study = load_study(name)
    profile = load_profile(profile_path(study.profile), study)
    sections = {section: getattr(profile, section) for section in SECTIONS}
    return report.compared_in(study.profile, SimpleNamespace(**sections, run=profile.run), study)


@pytest.fixture
def compared(monkeypatch) -> Compared:
    """The study `steps` with two runs at one number of steps."""
    monkeypatch.chdir(ROOT)
    found = compared_in("steps")
    changes = {"rewards": ("hps", "clip_score"), "steps": (10,)}
    evaluation = found.settings.evaluation.model_copy(update=changes)
    settings = SimpleNamespace(**{**vars(found.settings), "evaluation": evaluation})
    return replace(found, settings=settings, runs=[("g2rpo", 1), ("dance_grpo", 1)])


@pytest.fixture
def measured(results, compared) -> pd.DataFrame:
    """The table of `results` with an image statistic, and four training records, two held out."""
    records = pd.DataFrame(
        {
            "iteration": range(4),
            "num_forward_evals": np.arange(4) * 10.0,
            "num_transitions": np.arange(4) * 3.0,
            "old_policy_ratio_error": [0.0, 2e-7, 1e-7, 0.0],
            "heldout_hps": [0.1, np.nan, np.nan, 0.3],
            "correlation_hps_2": [0.7, 0.8, 0.9, 1.0],
            "gap_hps_2": [0.1, 0.2, 0.3, 0.4],
            "rounded_share": [0.0, 0.1, 0.0, 0.0],
            "step_share": [np.nan, 0.9, 0.3, 0.3],
        }
    )
    stats = results[results.reward == "hps"].assign(reward="sharpness")
    scores = pd.concat([results, stats]).assign(checkpoint="final", steps=10, reason=None)
    scores.loc[scores.prompt_id == "p3", "score"] = np.nan
    run = {"method": "g2rpo", "seed": 1}
    lines = [
        *comparison_lines(compared, scores),
        *missing_lines(scores),
        {"part": "warning", **run, "iteration": 3, "note": "nothing is left to learn from"},
        *learning_notes(compared, {("g2rpo", 1): records}),
        *prompt_lines(compared, scores),
        {"part": "ceiling", "method": "base", "seed": 0, "reward": "hps", "value": 0.9},
        {"part": "ceiling", "method": "base", "seed": 0, "reward": "clip_score", "value": 0.8},
        *training_lines(dict.fromkeys(compared.runs, records)),
    ]
    return tabulate(lines, ABOUT)


@pytest.fixture
def path(measured, tmp_path) -> Path:
    write_results(tmp_path / "results.parquet", measured)
    (tmp_path / "runs.txt").write_text("run weights\ng2rpo-1 abc\n")
    return tmp_path / "results.parquet"


def test_every_comparison_is_paired_by_prompt_without_those_that_lack_a_score(measured):
    """One run is above the base by 0.1 in one of two rewards, the other below by 0.2."""
    table = measured[measured.difference.notna()].fillna({"against": "", "style": ""})
    found = table.set_index(["part", "method", "against", "style", "reward"])
    assert found.difference.to_dict() == pytest.approx(
        {
            ("run", "g2rpo", "", "", "hps"): 0.1,
            ("run", "g2rpo", "", "", "clip_score"): 0,
            ("run", "g2rpo", "", "", "sharpness"): 0.1,
            ("run", "g2rpo", "", "", TRAINING): 0.1,
            ("run", "dance_grpo", "", "", "hps"): -0.2,
            ("run", "dance_grpo", "", "", "clip_score"): 0,
            ("run", "dance_grpo", "", "", "sharpness"): -0.2,
            ("run", "dance_grpo", "", "", TRAINING): -0.2,
            ("style", "g2rpo", "", "one", TRAINING): 0.1,
            ("style", "g2rpo", "", "two", TRAINING): 0.1,
            ("style", "dance_grpo", "", "one", TRAINING): -0.2,
            ("style", "dance_grpo", "", "two", TRAINING): -0.2,
            ("pair", "g2rpo", "dance_grpo", "", TRAINING): 0.3,
            ("pair", "g2rpo", "dance_grpo", "", "hps"): 0.3,
            ("pair", "g2rpo", "dance_grpo", "", "clip_score"): 0,
            ("matrix", "g2rpo", "dance_grpo-1", "", TRAINING): 0.3,
            ("matrix", "dance_grpo", "g2rpo-1", "", TRAINING): -0.3,
        }
    )
    assert found.win_rate.xs("matrix").tolist() == [1, 0]
    assert found.pairs.groupby("style").unique().explode().to_dict() == {
        "": 49,
        "one": 39,
        "two": 10,
    }
    (missing,) = set(measured[measured.part == "missing"].missing)
    assert missing == 1 == measured[measured.part == "run"].missing.max()


def test_a_table_gives_back_what_was_measured(measured, compared, path):
    back = read_measured(compared, path, path.with_name("runs.txt"))
    assert set(measured.part) == {*PARTS} - {"seed"}
    notes = measured[measured.part == "learning"].note.tolist()
    assert notes[-1].startswith("the first iteration moved weights by 0.9 of the learning rate")
    kept = measured[measured.part != "matrix"].reset_index(drop=True)
    pd.testing.assert_frame_equal(back, kept)
    assert back.attrs == ABOUT | {"hashes": [("run", "weights"), ("g2rpo-1", "abc")]}
    # A page shows of the file what it showed before, but for the matrix of single runs
    before, after = (build_page(compared, table, Title("steps")) for table in (measured, back))
    assert headline(before) == headline(after) and before.matrix and not after.matrix


def test_of_training_a_table_keeps_measurements_and_what_a_report_shows_once(measured, compared):
    training = build_page(compared, measured, Title("steps")).training
    for run in compared.runs:
        assert training["curves"][run].heldout_hps.tolist() == [0.1, 0.3]
        cost = training["costs"][run]
        shown = ("iteration", "num_forward_evals", "num_transitions", "ratio_error")
        assert [cost[name] for name in shown] == [3, 30.0, 9.0, 2e-7]
    for line in training["granularities"]:
        assert (line["gap"], line["correlation"]) == pytest.approx((0.25, 0.85))


def test_scores_by_prompt_are_kept_and_else_the_means(results, measured, path):
    scores = scores_in(pd.read_parquet(path))
    known = results.score[results.prompt_id != "p3"]
    assert len(scores) == len(results) and scores.score.dropna().tolist() == known.tolist()
    write_results(path, measured[measured.part != "prompt"])
    means = scores_in(pd.read_parquet(path)).set_index(["method", "reward"])
    run = by_run(measured[measured.part == "run"])["g2rpo", 1]
    assert means.prompt_id.isna().all() and means.score["g2rpo", "hps"] == run["hps"].value


def test_a_lead_is_claimed_only_if_every_seed_shows_it_and_labels_are_text(measured, compared):
    entries = {**compared.entries, "g2rpo": replace(compared.entries["g2rpo"], label="<b>ours")}
    page = build_page(replace(compared, entries=entries), measured, Title("steps"))
    for ahead, claim in (1, "<b>ours is ahead of DanceGRPO"), (0, "No lead is shown: <b>ours"):
        lead = page.verdict["lead"] | {"ahead": ahead}
        changed = replace(page, verdict=page.verdict | {"lead": lead})
        told = fill({"page": page, **vars(changed), "forest": None, "curves": None})
        assert claim in told["report.md"] and str(escape(claim)) in told["report.html"]
        assert "<b>ours" not in told["report.html"]


def test_a_committed_study_has_all_that_its_page_shows(monkeypatch):
    monkeypatch.chdir(ROOT)
    home, study = Path("studies", "compare"), load_study("compare")
    compared = compared_in("compare")
    table = read_measured(compared, home / "results.parquet", home / "runs.txt")
    page = build_page(compared, table, report.title_of(study))
    committed = (home / "reports" / "report.md").read_text()
    assert (home / "reports" / "forest.svg").read_text() == small(svg(forest_of(page)))
    for line in page.verdict["trained"]:
        gain = f"{line.difference:+.4f} [{line.low:+.4f}, {line.high:+.4f}]"
        assert f"| {compared.labels[line.method]} | {gain} |" in committed
    least, *_, most = page.training["compute"].values()
    assert f"{most / least:.2f} times the total compute" in committed
    for method, seed in compared.runs:
        mean = page.runs[method, seed][compared.settings.evaluation.rewards[0]].value
        assert f"| {compared.labels[method]} | {seed} | {mean:.4f}" in committed
    named = [f"{method}-{seed}" for method in study.methods for seed in study.seeds]
    assert [line[0] for line in table.attrs["hashes"]][1:] == ["base-0", *named]


@pytest.mark.parametrize(
    "harm, message",
    [
        (lambda file: file.write_bytes(file.read_bytes()[:2000]), "damaged"),
        (
            lambda file: pd.read_parquet(file).query("seed != 3").to_parquet(file),
            "has no hps of g2rpo-3",
        ),
    ],
)
def test_a_table_that_lacks_something_is_named_in_one_line(tmp_path, harm, message):
    (tmp_path / "profiles").symlink_to(ROOT / "profiles")
    home = tmp_path / "studies" / "steps"
    home.mkdir(parents=True)
    for file in ("params.yaml", "results.parquet", "runs.txt"):
        (home / file).write_bytes((ROOT / "studies" / "steps" / file).read_bytes())
    harm(home / "results.parquet")
    done = run_here(report.main, "--profile", "tiny", "--study", "steps", folder=tmp_path)
    assert done.returncode == 1 and done.stderr.count("\n") == 1 and message in done.stderr, (
        done.stderr
    )
    assert done.stderr.startswith("error: studies/steps/results.parquet: ")
