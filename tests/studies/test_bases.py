"""A study over several bases: each is a project of its own, and the report infers over them."""

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from dvc.repo import Repo
from ruamel.yaml import YAML
from scipy import stats

from g2rpo_core.config import load_study, profile_path, resolve
from g2rpo_core.foundation.errors import UserError
from g2rpo_core.reporting.conclusions import headline
from g2rpo_core.reporting.measured import Sources, measure
from g2rpo_core.reporting.page import Title, build_page
from g2rpo_core.reporting.recorded import read_measured, write_results
from stages.dvc import options_of
from stages.profile import write_profile
from studies import __main__ as studies
from studies.bases import base_graph, base_params, of_base
from tests.conftest import ROOT
from tests.fixtures.commands import run_module
from tests.fixtures.projects import seconds_checkout
from tests.reporting.test_recorded import compared_in

STUDY = """
study: several
profile: {profile}
seeds: [3, 4]
bases: [0, 2, 5]
title: Several
about: Over bases.
equal: [iterations]
methods: [first, second]
entries:
  first:
    method: g2rpo
    label: The first
    settings: {{tree: {{sde_steps: [0, 1], granularities: [1]}}}}
    training: {{iterations: 1, snapshots: []}}
  second: {{method: mix_grpo, label: The second, training: {{iterations: 1, snapshots: []}}}}
changes:
  rewards: {{noise: {{class: "studies.dose.reward:Noise", label: "noise?"}}}}
  evaluation:
    diversity: null
    rewards: [hps, clip_score, verifier]
    checkpoints: [final]
    steps: [{steps}]
  training: {{snapshots: [], monitor: {{every: 1, prompts: 3, rewards: [verifier]}}}}
comparisons: [{{method: first, against: second, role: primary}}]
"""


@pytest.fixture
def study(here):
    """A folder with the project's graph and profiles, and a study of profile `tiny`."""
    for name in ("profiles", "dvc.yaml", ".dvcignore", "g2rpo_core", "stages"):
        (here / name).symlink_to(ROOT / name)
    home = here / "studies" / "several"
    home.mkdir(parents=True)
    shutil.copy(ROOT / "studies" / "study.yaml", here / "studies")
    (home / "params.yaml").write_text(STUDY.format(profile="tiny", steps=10))
    return load_study("several")


@pytest.mark.parametrize(
    "before, after, name, complaint",
    [
        ("", "", "several/base-3", "there is no 3, only 0, 2, 5"),
        ("[0, 2, 5]", "[0, 2]", "several", "needs at least three"),
        ("role: primary", "role: secondary", "several", "one may be primary"),
        ("role: primary", "role: primary, test: exact", "several", "at least 6 bases"),
        # DVC refuses these
        ('"studies.dose.reward:Noise"', "a:B", "several", "not YAML: .*line 18, .*in quotes"),
        ('"noise?"', "noise?", "several", "not YAML: .* line 18, .*in quotes"),
    ],
)
def test_what_a_study_over_bases_cannot_ask_is_refused(study, before, after, name, complaint):
    file = Path("studies/several/params.yaml")
    file.write_text(file.read_text().replace(before, after))
    with pytest.raises(UserError, match=complaint):
        load_study(name)


def test_a_bases_graph_is_one_that_dvc_reads_with_models_of_its_own(study):
    home, source = Path("studies/several/base-2"), profile_path("tiny")
    files = {"dvc.yaml": base_graph(studies.GRAPH), "params.yaml": base_params(of_base(study, 2))}
    studies.write_project(home, "../../../", files)
    written = resolve(source, load_study("several/base-2")).data
    write_profile(home / "reports" / "profile.yaml", written, source)
    stages = {stage.name: stage for stage in Repo(str(home)).index.stages}
    runs = [f"{name}-{seed}" for name in ("first", "second") for seed in (3, 4)]
    assert set(stages) == {
        "code",
        "profile",
        "models",
        "embed",
        "evaluate_base",
        *(f"{one}@{run}" for one in ("train", "evaluate") for run in runs),
    }
    for name, stage in stages.items():
        assert (
            stage.cmd.startswith("cd ../../.. && python -m stages.")
            and "--profile tiny --study several/base-2" in stage.cmd
        )
        # All code and prompts are the project's
        assert all(
            (home / dep.def_path).exists()
            or not dep.def_path.startswith("..")
            or "prompts" in dep.def_path
            for dep in stage.deps
        ), name
    reads = {
        name: {dep.def_path for dep in stages[name].deps}
        for name in ("embed", "train@first-3", "evaluate_base")
    }
    assert (
        all("models" in deps for deps in reads.values())
        and "../../../prompts/tiny" in reads["embed"]
    )
    assert {"embeddings"} < reads["train@first-3"] & reads["evaluate_base"]
    deps = {dep.def_path: dep for dep in stages["train@first-3"].deps}
    settings = deps["reports/profile.yaml"].read_params(flatten=False)
    assert settings["rewards"]["noise"]["class"] == "studies.dose.reward:Noise"
    # Looked up from the main project's folder, whose graph has no such stage
    options = {"profile": "tiny", "study": "several/base-2", "method": "first", "seed": "3"}
    assert options_of("train@first-3", home) == options and options_of("train@first-9", home) == {}


def evaluated(home: Path, base: int, rewards: dict[str, dict[tuple[str, int], float]]) -> None:
    """Write results of 40 prompts, and records, that say how much a reward's mean is shifted."""
    rng, prompts = (
        np.random.default_rng(base),
        pd.DataFrame({"prompt_id": map("p{}".format, range(40))}),
    )
    level = rng.normal(0.5, 0.1, len(prompts)) + base
    for name, seed in rewards["hps"]:
        parts = [
            prompts.assign(
                reward=reward, score=level + shifts[name, seed] + rng.normal(0, 1e-3, 40)
            )
            for reward, shifts in rewards.items()
        ]
        about = {"method": name, "seed": seed, "checkpoint": "final", "steps": 10, "style": "one"}
        for folder in ("evaluations", "runs"):
            (home / folder / f"{name}-{seed}").mkdir(parents=True)
        table = pd.concat(parts).assign(**about, reason=None)
        table.to_parquet(home / "evaluations" / f"{name}-{seed}" / "results.parquet")
        record = {
            "iteration": [0, 1],
            "num_forward_evals": [0.0, 36.0 + seed],
            "num_transitions": [0, 2],
            "heldout_hps": [base, base + rewards["hps"][name, seed]],
        }
        pd.DataFrame(record).to_parquet(home / "runs" / f"{name}-{seed}" / "records.parquet")


def test_the_report_infers_over_bases_and_its_table_keeps_every_seed(study, tmp_path):
    """Seeds of one base are alike and bases are not: the interval is that of the bases' means."""
    effect, sources = {0: 0.1, 2: 0.3, 5: 0.2}, {}
    for base, gain in effect.items():
        home = Path("studies/several", f"base-{base}")
        runs = {("base", 0): 0.0, ("second", 3): 0.0, ("second", 4): 0.0}
        shifts = runs | {("first", seed): gain + seed / 1000 for seed in (3, 4)}
        flat = dict.fromkeys(shifts, 0.0)
        evaluated(home, base, {"hps": shifts, "clip_score": flat, "verifier": flat})
        sources[base] = Sources(
            runs=home / "runs",
            evaluations=home / "evaluations",
            prompts=Path("prompts"),
            quality=home / "quality.json",
            timings=home / "timings",
            page=tmp_path,
            locks=(),
        )
        (home / "quality.json").write_text('{"vae": {"loss": 0.1}}')
    Path("prompts").mkdir()
    for part in ("train", "test"):
        table = pd.DataFrame({"id": ["0", "1"], "prompt": [f"{part} 0", f"{part} 1"]})
        table.assign(style="one").to_parquet(f"prompts/{part}.parquet")
    runs = [(name, base) for name in study.methods for base in study.bases]
    compared = replace(compared_in("several"), runs=runs, bases=study.bases, seeds=study.seeds)
    measured = measure(compared, sources)
    page = build_page(compared, measured, Title("several"))
    (group,) = page.gains.groups
    first = group.variants[0]["first"]
    expected = [gain + 0.0035 for gain in effect.values()]
    low, high = stats.t.interval(0.95, 2, np.mean(expected), stats.sem(expected))
    found = (first.difference, first.low, first.high)
    assert found == pytest.approx((np.mean(expected), low, high), abs=2e-3)
    # Methods are compared over bases, not on each; bases start far apart, so that curves are gains
    assert page.part("pair") == page.part("matrix") == []
    drawn = [list(page.training["curves"]["first", base].heldout_hps) for base in study.bases]
    assert drawn == [pytest.approx([0.0, gain]) for gain in expected]
    # What is committed: the report's numbers, and every seed's, but no prompt's
    write_results(tmp_path / "results.parquet", measured)
    table = pd.read_parquet(tmp_path / "results.parquet")
    kept = table[(table.part == "seed") & (table.method == "first") & (table.reward == "hps")]
    assert "prompt" not in set(table.part) and sorted(kept.seed) == [3, 3, 3, 4, 4, 4]
    (tmp_path / "runs.txt").write_text("run code\nbase-0/first-3 x\n")
    again = read_measured(compared, tmp_path / "results.parquet", tmp_path / "runs.txt")
    assert headline(build_page(compared, again, Title("several"))) == headline(page)


@pytest.mark.slow
def test_a_study_over_bases_builds_trains_and_reports(tmp_path):
    """About five minutes on an idle core: three bases of a few fit steps, one run on each."""
    seconds_checkout(tmp_path)
    (tmp_path / "params.yaml").write_text(
        "profile: seconds\nmethods: [g2rpo]\nseeds: [7]\npublished: []\n"
    )
    home = tmp_path / "studies" / "several"
    home.mkdir()
    params = (
        STUDY.format(profile="seconds", steps=2)
        .replace("seeds: [3, 4]", "seeds: [3]")
        .replace("[first, second]", "[first]")
    )
    (home / "params.yaml").write_text(params.partition("comparisons")[0])
    done = run_module("studies", "run", "several", folder=tmp_path, DVC_NO_ANALYTICS="1")
    assert done.returncode == 0, done.stderr[-2000:]
    assert "over builds: Student's t" in (home / "reports" / "report.md").read_text()
    hashes = pd.read_csv(home / "runs.txt", sep=" ", index_col="run", dtype=str)
    assert list(hashes.index) == [
        f"base-{base}/{name}" for base in (0, 2, 5) for name in ("base-0", "first-3")
    ]
    assert hashes.inputs.nunique() == 3 and hashes.scores.nunique() == 6
    built = YAML(typ="safe").load(home / "base-5" / "reports" / "profile.yaml")["models"]
    assert built["seed"] == 5 and "pickscore" not in built
    assert sorted(path.name for path in (home / "base-5" / "models").iterdir()) == [
        "clip_score",
        "hps",
        "models.lock.json",
        "pipeline",
        "quality.json",
    ]
    assert not (tmp_path / "models").exists()
