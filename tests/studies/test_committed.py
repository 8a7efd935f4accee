import pandas as pd
import pytest
from ruamel.yaml import YAML

from g2rpo_core.config import load_study
from studies import __main__ as studies
from studies.committed import hashes_in, states, write_seconds
from tests.conftest import ROOT
from tests.fixtures.commands import run_here
from tests.fixtures.projects import git

STUDIES = sorted(
    path.parent.name for path in (ROOT / "studies").glob("*/results.parquet")
)  # those that have run
KEPT = {
    "README.md",
    "params.yaml",
    "results.parquet",
    "runs.txt",
    "reports/report.md",
    "reports/forest.svg",
}
PROBED = {"gradients.json"}  # what was measured without training
OWN = {
    "dose": {"reward.py"},
    "paper_over_bases": {"reward.py"},
    "words": {"judges.py"},
    "words_equal": {"equal_reward.py"},
    "choices": PROBED,
    "marks_choices": PROBED,
    "equal_compute": PROBED,
}


def stage(out: str, md5: str, code: str = "c", eta: float = 0.7) -> dict:
    deps = [
        {"path": "../../g2rpo_core/algorithm", "md5": code},
        {"path": "../../models/tiny", "md5": "m"},
    ]
    return {
        "deps": deps,
        "params": {"reports/profile.yaml": {"eta": eta}},
        "outs": [{"path": out, "md5": md5}],
    }


def lock(folder, **changes) -> pd.DataFrame:
    """The hashes of a lock with the base and one run; changes: of the run's training."""
    stages = {
        "evaluate_base": stage("evaluations/base-0", "b"),
        "train@g2rpo-1": stage("runs/g2rpo-1", **({"md5": "w"} | changes)),
        "evaluate@g2rpo-1": stage("evaluations/g2rpo-1", "s"),
    }
    YAML().dump({"stages": stages}, folder / "dvc.lock")
    return hashes_in(folder / "dvc.lock")


def test_a_run_has_the_hashes_of_what_it_was_made_from_and_made(tmp_path):
    found = lock(tmp_path)
    assert found.weights.to_dict() == {"base-0": "-", "g2rpo-1": "w"}
    assert found.scores.to_dict() == {"base-0": "b", "g2rpo-1": "s"}
    for change, name in (
        ({"code": "other"}, "code"),
        ({"eta": 0.8}, "settings"),
        ({"md5": "other"}, "weights"),
    ):
        other = lock(tmp_path, **change).loc["g2rpo-1"]
        assert list(other.index[other != found.loc["g2rpo-1"]]) == [name]


def test_other_code_with_the_same_weights_and_scores_is_equal(tmp_path):
    before = lock(tmp_path)
    assert states(before, lock(tmp_path, code="other")).to_dict() == {
        "base-0": "equal",
        "g2rpo-1": "equal     code",
    }
    assert states(before, lock(tmp_path, md5="other"))["g2rpo-1"] == "different weights"
    assert states(before, before.loc[["base-0"]])["g2rpo-1"] == "missing"


@pytest.fixture
def project(tmp_path):
    """A checkout with the study `steps`, committed."""
    home = tmp_path / "studies" / "steps"
    home.mkdir(parents=True)
    (tmp_path / "profiles").symlink_to(ROOT / "profiles")
    for file in ("params.yaml", "runs.txt"):
        (home / file).write_bytes((ROOT / "studies" / "steps" / file).read_bytes())
    git(tmp_path, "init")
    git(tmp_path, "add", "-A")
    git(tmp_path, "commit", "-m", "first")
    return tmp_path


def test_verify_compares_a_lock_with_the_committed_lines(project):
    done = run_here(studies.main, "verify", "steps", folder=project)
    assert (done.returncode, done.stderr) == (
        1,
        "error: studies/steps was not run here: python -m studies run steps\n",
    )
    home = project / "studies" / "steps"
    lines = [line.split() for line in (home / "runs.txt").read_text().splitlines()[1:]]
    assert len(lines) == 10
    stages = {}
    for run, *_, weights, scores in lines:
        stages[f"evaluate@{run}" if weights != "-" else "evaluate_base"] = stage(
            f"evaluations/{run}", scores
        )
        if weights != "-":
            stages[f"train@{run}"] = stage(f"runs/{run}", weights)
    YAML().dump({"stages": stages}, home / "dvc.lock")
    done = run_here(studies.main, "verify", "steps", folder=project)
    assert (done.returncode, done.stdout) == (0, "10 equal, 0 different, 0 missing\n")
    stages["train@mix_grpo-2"]["outs"][0]["md5"] = "other"
    del stages["evaluate@dance_grpo-3"]
    YAML().dump({"stages": stages}, home / "dvc.lock")
    hashes_in(home / "dvc.lock").to_csv(
        home / "runs.txt", sep=" "
    )  # as after a run: the commit counts
    done = run_here(studies.main, "verify", "steps", folder=project)
    assert done.returncode == 1 and done.stdout.splitlines() == [
        "mix_grpo-2 different code, settings, inputs, weights",
        "dance_grpo-3 missing",
        "8 equal, 1 different, 1 missing",
    ]


def test_seconds_are_medians_and_those_of_runs_made_elsewhere_stay(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    study = load_study("steps")
    (tmp_path / "seconds.json").write_text('{"mix_grpo": {"seconds": 61.0, "runs": 8}}')
    for seed, seconds in zip(study.seeds, (5.0, 90.0, 7.04)):
        (tmp_path / f"g2rpo-{seed}.json").write_text(
            f'{{"seconds": {{"0": 0.0, "150": {seconds}}}}}'
        )
    write_seconds(tmp_path / "seconds.json", study, [tmp_path])
    written = YAML(typ="safe").load(tmp_path / "seconds.json")
    assert written == {
        "mix_grpo": {"seconds": 61.0, "runs": 8},
        "g2rpo": {"seconds": 7.0, "runs": 3},
    }


@pytest.mark.parametrize("name", STUDIES)
def test_a_study_commits_its_settings_numbers_and_page_alone(name, monkeypatch):
    monkeypatch.chdir(ROOT)
    listed = git(ROOT, "ls-files", f"studies/{name}").split()
    assert {file.split("/", 2)[2] for file in listed} - {"seconds.json"} == KEPT | OWN.get(
        name, set()
    )
    study = load_study(name)
    assert set(study.methods) == set(study.entries)
    runs = [
        line.split()[0]
        for line in (ROOT / "studies" / name / "runs.txt").read_text().splitlines()[1:]
    ]
    named = ["base-0", *(f"{method}-{seed}" for method in study.methods for seed in study.seeds)]
    assert runs == ([f"base-{base}/{run}" for base in study.bases for run in named] or named)
