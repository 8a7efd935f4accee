from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest

from g2rpo_core.config import load_profile, load_study, profile_path
from g2rpo_core.evaluation.results import SCORES
from g2rpo_core.reporting.charts import svg
from g2rpo_core.reporting.context import build_context
from g2rpo_core.reporting.measured import Compared, Measured
from g2rpo_core.reporting.recorded import gains_in, read_measured, scores_in, write_results
from g2rpo_core.reporting.render import small
from g2rpo_core.reporting.tables import cells, main_table, method_pairs, style_table
from stages.report import SECTIONS
from stages.report import main as report
from tests.conftest import ROOT
from tests.fixtures.commands import run_here

STUDIES = sorted(path.parent.name for path in (ROOT / "studies").glob("*/results.parquet"))  # those that have run
ABOUT = {"prompts": 50, "prompt_counts": "50 prompts", "models": [["vae", "loss 0.1"]], "versions": "Python 3", "hashes": []}


def compared_in(name: str) -> Compared:
    study = load_study(name)
    profile = load_profile(profile_path(study.profile), study)
    settings = SimpleNamespace(**{section: getattr(profile, section) for section in SECTIONS})
    entries = {entry: profile.run(entry) for entry in profile.methods}
    runs = [(method, number) for method in study.methods for number in study.bases or study.seeds]
    unit = "base" if study.bases else "seed"
    return Compared(study.profile, settings, entries, runs, (), study.comparisons, unit, study.seeds)


@pytest.fixture
def compared(monkeypatch) -> Compared:
    """The study `steps` with two runs at one number of steps."""
    monkeypatch.chdir(ROOT)
    found = compared_in("steps")
    evaluation = found.settings.evaluation.model_copy(update={"rewards": ("hps", "clip_score"), "steps": (10,)})
    settings = SimpleNamespace(**{**vars(found.settings), "evaluation": evaluation})
    return replace(found, settings=settings, runs=[("g2rpo", 1), ("dance_grpo", 1)])


@pytest.fixture
def found(results, compared) -> Measured:
    """What is measured of `results`, with training records of four iterations, two of which measured held-out rewards."""
    runs, rewards, on = compared.runs, ["hps", "clip_score"], {name: {"hps": 1.0} for name in ("g2rpo", "dance_grpo")}
    records = pd.DataFrame(
        {
            "iteration": range(4),
            "num_forward_evals": np.arange(4) * 10.0,
            "num_transitions": np.arange(4) * 3.0,
            "old_policy_ratio_error": [0.0, 2e-7, 1e-7, 0.0],
            "heldout_hps": [0.1, np.nan, np.nan, 0.3],
            "correlation_hps_2": [0.7, 0.8, 0.9, 1.0],
            "gap_hps_2": [0.1, 0.2, 0.3, 0.4],
        }
    )
    missing = {"missing": 2, "scores": 50, "reason": "no answer"}
    return Measured(
        variants=[("final", 10, main_table(results, ("base", 0), runs, rewards, on))],
        stats={run: cells(results.replace({"reward": {"hps": "sharpness"}}), ("base", 0), run, ["sharpness"]) for run in runs},
        styles=style_table(results, ("base", 0), runs, on),
        pairs=method_pairs(results, runs, rewards, on),
        matrices=[],
        missing=[{"method": "g2rpo", "seed": 1, "checkpoint": "final", "steps": 10, "reward": "hps", **missing}],
        records=dict.fromkeys(runs, records),
        warnings=[(("g2rpo", 1), 3, "nothing is left to learn from")],
        about=ABOUT,
        scores=results.assign(checkpoint="final", steps=10, reason=None)[SCORES],
    )


@pytest.fixture
def table(found, compared, tmp_path) -> Path:
    write_results(tmp_path / "results.parquet", compared, found)
    (tmp_path / "runs.txt").write_text("run weights\ng2rpo-1 abc\n")
    return tmp_path / "results.parquet"


def test_a_table_gives_back_what_was_measured(found, compared, table):
    back = read_measured(compared, table, table.with_name("runs.txt"))
    for part in ("variants", "stats", "styles", "pairs", "warnings"):
        assert getattr(back, part) == getattr(found, part), part
    assert [{key: line[key] for key in found.missing[0]} for line in back.missing] == found.missing
    assert back.about == ABOUT | {"hashes": [("run", "weights"), ("g2rpo-1", "abc")]}


def test_of_training_a_table_has_what_a_report_shows(found, compared, table):
    before, after = (build_context(compared, one) for one in (found, read_measured(compared, table, table.with_name("runs.txt"))))
    assert after["curves"] == before["curves"] and after["granularities"] == before["granularities"]
    shown = ("iteration", "num_forward_evals", "num_transitions", "ratio_error")
    costs = ({run: [cost[name] for name in shown] for run, cost in one["costs"].items()} for one in (before, after))
    assert next(costs) == next(costs)


def test_scores_by_prompt_are_kept_and_else_the_means(found, compared, table):
    scores = scores_in(pd.read_parquet(table))
    assert len(scores) == len(found.scores) and scores.score.tolist() == found.scores.score.tolist()
    write_results(table, compared, replace(found, scores=found.scores[:0]))
    means = scores_in(pd.read_parquet(table)).set_index(["method", "reward"])
    assert means.prompt_id.isna().all() and set(means.index.get_level_values("reward")) == {"hps", "clip_score"}
    row = next(row for row in found.rows if row.method == "g2rpo")
    assert means.score["g2rpo", "hps"] == row.cells["hps"].mean
    assert gains_in(pd.read_parquet(table))["g2rpo", 1] == row.trained.mean


@pytest.mark.parametrize("name", STUDIES)
def test_a_committed_study_has_all_that_its_page_shows(name, monkeypatch):
    monkeypatch.chdir(ROOT)
    compared, home = compared_in(name), Path("studies", name)
    found = read_measured(compared, home / "results.parquet", home / "runs.txt")
    context = build_context(compared, found)
    page = (home / "reports" / "report.md").read_text()
    assert (home / "reports" / "forest.svg").read_text() == small(svg(context["forest"]))
    assert "[../runs.txt](../runs.txt)" in page and found.about["hashes"][1][1] not in page
    assert context["verdict"] in page and context["prompt_counts"] in page and f"> {context['notice']}\n" in page
    for label, row in ((compared.labels[row.method], row) for row in found.rows if row.trained):
        assert f"| {label} | {row.seed} | {next(iter(row.cells.values())).mean:.4f}" in page
    assert set(context["costs"]) == set(compared.runs) and context["curves"]["concat"] and context["first_pictures"] == []
    study = load_study(name)
    named = [f"{method}-{seed}" for method in study.methods for seed in study.seeds]
    of_bases = [f"base-{base}/{run}" for base in study.bases for run in ("base-0", *named)]
    assert [line[0] for line in found.about["hashes"]][1:] == (of_bases or ["base-0", *named])


@pytest.mark.parametrize(
    "harm, message",
    [
        (lambda file: file.unlink(), "does not exist"),
        (lambda file: file.write_bytes(file.read_bytes()[:2000]), "damaged"),
        (lambda file: pd.read_parquet(file).drop(columns="low").to_parquet(file), "has no column 'low'"),
        (lambda file: pd.read_parquet(file).query("seed != 3").to_parquet(file), "has no hps of g2rpo-3"),
        (lambda file: pd.read_parquet(file).query("part != 'training'").to_parquet(file), "has no training records of g2rpo-1"),
    ],
)
def test_a_table_that_lacks_something_is_named_in_one_line(tmp_path, harm, message):
    (tmp_path / "profiles").symlink_to(ROOT / "profiles")
    home = tmp_path / "studies" / "steps"
    home.mkdir(parents=True)
    for file in ("params.yaml", "results.parquet", "runs.txt"):
        (home / file).write_bytes((ROOT / "studies" / "steps" / file).read_bytes())
    harm(home / "results.parquet")
    done = run_here(report, "--profile", "tiny", "--study", "steps", folder=tmp_path)
    assert done.returncode == 1 and done.stderr.count("\n") == 1 and message in done.stderr, done.stderr
    assert done.stderr.startswith("error: studies/steps/results.parquet: ")


def test_a_small_picture_keeps_its_marks_and_words():
    image = '<g class="a" role="x" aria-label="gain: 0.1"><path class="foreground" d="" display="none"/><path d="M1.2345,2"/></g><text>+0.25</text>'
    assert small(image) == '<g><path d="M1.2,2"/></g><text>+0.25</text>'


def test_total_compute_is_in_the_table_of_costs_and_in_the_charts_switch(monkeypatch):
    monkeypatch.chdir(ROOT)
    compared, home = compared_in("families"), Path("studies", "families")
    context = build_context(compared, read_measured(compared, home / "results.parquet", home / "runs.txt"))
    (axis,) = (one["bind"]["options"] for one in context["curves"]["params"] if one["name"] == "axis")
    assert axis == ["iterations", "forward evaluations (NFE) in rollouts", "total compute"]
    cost = context["costs"]["g2rpo_coarse", 3001]  # no KL, twelve images an iteration
    assert (
        cost["images"] == 12 * 545 and cost["total_compute"] == cost["num_forward_evals"] + 3 * cost["num_transitions"] + 6 * 545
    )
    slow = context["costs"]["diffusion_nft", 3001]  # beside each noised image the base and the old policy
    assert slow["total_compute"] == slow["num_forward_evals"] + 5 * slow["num_transitions"] + slow["images"] / 2
