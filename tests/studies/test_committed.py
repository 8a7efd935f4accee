import pytest
from ruamel.yaml import YAML

from studies import __main__ as studies
from studies.committed import hashes_in
from tests.conftest import ROOT
from tests.fixtures.commands import run_here
from tests.fixtures.projects import git


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
