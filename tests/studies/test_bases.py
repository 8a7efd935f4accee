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

from g2rpo_core.config import load_profile, load_study, profile_path, resolve
from g2rpo_core.foundation.errors import UserError
from g2rpo_core.foundation.runs import SCRATCH, TRAINING_RECORDS
from g2rpo_core.inference.runs import find_weights
from g2rpo_core.reporting.conclusions import headline
from g2rpo_core.reporting.measured import Sources, measure_bases
from g2rpo_core.reporting.page import Title, build_page
from g2rpo_core.reporting.recorded import read_measured, write_results
from g2rpo_core.reporting.tables import records_of
from pipeline.cached import check_kept
from stages.dvc import options_of
from stages.profile import write_profile
from studies import __main__ as studies
from studies.bases import base_graph, base_params, lend_models, of_base
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
  rewards: {{noise: {{class: "studies.dose.reward:Noise", label: noise}}}}
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
    for name in ("profiles", "dvc.yaml", "g2rpo_core", "stages"):
        (here / name).symlink_to(ROOT / name)
    home = here / "studies" / "several"
    home.mkdir(parents=True)
    shutil.copy(ROOT / "studies" / "study.yaml", here / "studies")
    (home / "params.yaml").write_text(STUDY.format(profile="tiny", steps=10))
    return load_study("several")


def write_graph(home: Path, study) -> None:
    """The DVC project of base 2 of a study."""
    files = {"dvc.yaml": base_graph(studies.GRAPH), "params.yaml": base_params(of_base(study, 2))}
    studies.write_project(home, "../../../", files)


@pytest.fixture
def home(study) -> Path:
    """The project of the study's base 2, with its profile."""
    home, source = Path("studies/several/base-2"), profile_path("tiny")
    write_graph(home, study)
    written = resolve(source, load_study("several/base-2")).data
    write_profile(home / "reports" / "profile.yaml", written, source)
    return home


def test_a_base_has_its_seed_and_builds_only_what_the_study_uses(study):
    profile = load_profile(profile_path("tiny"), load_study("several/base-2"))
    assert (
        profile.models.seed == 2
        and profile.models.flux
        and profile.models.hps
        and profile.models.clip_score
    )
    assert (
        profile.models.pickscore
        is profile.models.image_reward
        is profile.models.unified_reward
        is None
    )
    unchanged = load_profile(profile_path("tiny"), study)
    assert unchanged.models == load_profile(profile_path("tiny")).models
    assert profile.run("first") == unchanged.run("first")


@pytest.mark.parametrize(
    "before, after, name, complaint",
    [
        ("", "", "several/base-3", "there is no 3, only 0, 2, 5"),
        ("[0, 2, 5]", "[0, 2]", "several", "needs at least three"),
        ("role: primary", "role: secondary", "several", "one may be primary"),
        ("role: primary", "role: primary, test: exact", "several", "at least 6 bases"),
    ],
)
def test_what_a_study_over_bases_cannot_ask_is_refused(study, before, after, name, complaint):
    file = Path("studies/several/params.yaml")
    file.write_text(file.read_text().replace(before, after))
    with pytest.raises(UserError, match=complaint):
        load_study(name)


def test_weights_of_a_base_are_not_laid_over_the_models_of_the_profile(study):
    run = Path("studies/several/base-2/runs/first-3")
    (run / "transformer").mkdir(parents=True)
    assert find_weights(str(run), "tiny") == run
    (run.parents[1] / "models").mkdir()
    with pytest.raises(UserError, match="was trained on a base of a study"):
        find_weights(str(run), "tiny")


def test_a_bases_graph_is_one_that_dvc_reads_with_models_of_its_own(home):
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
    settings = {dep.def_path: dep for dep in stages["train@first-3"].deps}[
        "reports/profile.yaml"
    ].read_params(flatten=False)
    assert settings["rewards"]["noise"]["class"] == "studies.dose.reward:Noise"


def test_a_stage_of_a_study_is_looked_up_in_its_own_graph(home):
    """From the main project's folder, whose graph has no such stage."""
    options = {"profile": "tiny", "study": "several/base-2", "method": "first", "seed": "3"}
    assert options_of("train@first-3", home) == options and options_of("train@first-9", home) == {}
    finished = home / "runs" / "first-3" / TRAINING_RECORDS
    finished.parent.mkdir(parents=True)
    check_kept(home, "train@first-3")
    finished.write_text("trained by hand")
    with pytest.raises(
        UserError, match=rf"first-3: DVC would remove.*`cd {home} && dvc commit -f train@first-3`"
    ):
        check_kept(home, "train@first-3")
    kept = (
        SCRATCH / "train" / "several" / "first-3" / "of_these_settings" / "out" / TRAINING_RECORDS
    )
    kept.parent.mkdir(parents=True)
    shutil.copy(finished, kept)
    check_kept(home, "train@first-3")


def test_a_base_that_another_study_has_built_is_not_built_again(study, monkeypatch):
    """By DVC itself: what it takes from its cache runs no command."""
    built, asks = (Path("studies", name, "base-2").absolute() for name in ("several", "other"))
    for home in (built, asks):
        write_graph(home, study.model_copy(update={"study": home.parts[-2]}))
        (home / "reports").mkdir()
        (home / "reports" / "profile.yaml").write_text(
            "{numerics: native, models: {seed: 2}, code: {models: v1}}\n"
        )
    (built / "models").mkdir()
    (built / "models" / "weights").write_text("fitted for minutes")
    monkeypatch.chdir(built)
    Repo().commit("models", force=True)
    lend_models(asks, "tiny_fresh")
    assert not (asks / "dvc.lock").exists()  # a base of another profile
    lend_models(asks, "tiny")
    monkeypatch.chdir(asks)
    Repo().reproduce("models", single_item=True)
    assert (asks / "models" / "weights").read_text() == "fitted for minutes"


def test_the_report_infers_over_bases_and_its_table_keeps_every_seed(study, tmp_path):
    """Seeds of one base are alike and bases are not: the interval is that of the bases' means."""
    rng, prompts = np.random.default_rng(0), 40
    effect = {0: 0.1, 2: 0.3, 5: 0.2}
    for base, gain in effect.items():
        home = Path("studies/several", f"base-{base}")
        level = rng.normal(0.5, 0.1, prompts) + base
        for name, seed, shift in [
            ("base", 0, 0.0),
            *((m, s, g + s / 1000) for m, g in (("first", gain), ("second", 0.0)) for s in (3, 4)),
        ]:
            rows = [
                {
                    "method": name,
                    "seed": seed,
                    "checkpoint": "final",
                    "steps": 10,
                    "prompt_id": f"p{n}",
                    "style": "one",
                    "reward": reward,
                    "score": value + (shift if reward == "hps" else 0.0),
                    "reason": None,
                }
                for reward in ("hps", "clip_score", "verifier")
                for n, value in enumerate(level + rng.normal(0, 1e-3, prompts) * (name != "base"))
            ]
            (home / "evaluations" / f"{name}-{seed}").mkdir(parents=True)
            if base == 0 and (name, seed) in (("base", 0), ("second", 3)):
                rows[-1] |= {"score": None, "reason": "no answer"}
            pd.DataFrame(rows).to_parquet(
                home / "evaluations" / f"{name}-{seed}" / "results.parquet"
            )
            if name != "base":
                (home / "runs" / f"{name}-{seed}").mkdir(parents=True)
                record = {
                    "iteration": [0, 1],
                    "num_forward_evals": [0.0, 36.0 + seed],
                    "num_transitions": [0, 2],
                    "heldout_hps": [base, base + shift],
                }
                pd.DataFrame(record).to_parquet(
                    home / "runs" / f"{name}-{seed}" / "records.parquet"
                )
        (home / "models").mkdir()
        (home / "models" / "quality.json").write_text('{"vae": {"loss": 0.1}}')
    Path("prompts").mkdir()
    for part in ("train", "test"):
        columns = {
            "id": [f"{part}{n}" for n in range(3)],
            "prompt": [f"{part} {n}" for n in range(3)],
            "style": ["one"] * 3,
        }
        pd.DataFrame(columns).to_parquet(f"prompts/{part}.parquet")
    compared = compared_in("several")
    runs = [(name, base) for name in study.methods for base in study.bases]
    compared = replace(compared, runs=runs, unit="base", seeds=study.seeds)
    homes = {base: Path("studies/several", f"base-{base}") for base in study.bases}
    sources = {
        b: Sources(
            runs=h / "runs",
            evaluations=h / "evaluations",
            prompts=Path("prompts"),
            quality=h / "models" / "quality.json",
            page=tmp_path,
            locks=(),
        )
        for b, h in homes.items()
    }
    measured = measure_bases(compared, sources)
    page = build_page(compared, measured, Title("several"))
    (group,) = page.gains.groups
    first = group.variants[0]["first"]
    expected = [gain + 0.0035 for gain in effect.values()]
    low, high = stats.t.interval(0.95, 2, np.mean(expected), stats.sem(expected))
    assert (first.difference, first.low, first.high) == pytest.approx(
        (np.mean(expected), low, high), abs=2e-3
    )
    records = records_of(measured)
    assert [records["first", base].num_forward_evals[1] for base in study.bases] == [39.5] * 3
    lacking = [(line.method, line.seed, line.missing, line.note) for line in page.part("missing")]
    assert lacking == [("base", 0, 1, "no answer"), ("second", 0, 1, "no answer")]
    # Methods are compared over bases, not on each; bases start far apart, so that curves are gains
    assert page.part("pair") == page.part("matrix") == []
    curves = page.training.curves
    drawn = {base: curves["first", base].heldout_hps[1] for base in study.bases}
    assert drawn == pytest.approx({base: gain + 0.0035 for base, gain in effect.items()})
    assert {curve.heldout_hps[0] for curve in curves.values()} == {0.0}
    # What is committed: the report's numbers, and every seed's, but no prompt's
    write_results(tmp_path / "results.parquet", measured)
    table = pd.read_parquet(tmp_path / "results.parquet")
    assert "prompt" not in set(table.part)
    kept = table[(table.part == "seed") & (table.method == "first") & (table.reward == "hps")]
    assert sorted(zip(kept.base, kept.seed)) == [
        (base, seed) for base in study.bases for seed in (3, 4)
    ]
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
