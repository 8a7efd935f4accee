import shutil
from functools import partial

from ruamel.yaml import YAML

from studies import __main__ as studies
from studies.committed import hashes_in
from tests.conftest import ROOT
from tests.fixtures.commands import run_here
from tests.fixtures.projects import git


def stage(out: str, md5: str) -> dict:
    code = {"path": "../../g2rpo_core/algorithm", "md5": "c"}
    return {
        "deps": [code, {"path": "../../models/tiny", "md5": "m"}],
        "params": {"reports/profile.yaml": {"eta": 0.7}},
        "outs": [{"path": out, "md5": md5}],
    }


def test_verify_compares_a_lock_with_the_committed_lines(tmp_path):
    home = tmp_path / "studies" / "steps"
    home.mkdir(parents=True)
    (tmp_path / "profiles").symlink_to(ROOT / "profiles")
    for file in ("params.yaml", "runs.txt"):
        shutil.copy(ROOT / "studies" / "steps" / file, home)
    for words in (["init"], ["add", "-A"], ["commit", "-m", "first"]):
        git(tmp_path, *words)
    verify = partial(run_here, studies.main, "verify", "steps", folder=tmp_path)
    said = "error: studies/steps was not run here: python -m studies run steps\n"
    assert verify().stderr == said
    lines = [line.split() for line in (home / "runs.txt").read_text().splitlines()[1:]]
    stages = {}
    for run, *_, weights, scores in lines:
        name = "evaluate_base" if weights == "-" else f"evaluate@{run}"
        stages[name] = stage(f"evaluations/{run}", scores)
        stages[f"train@{run}"] = stage(f"runs/{run}", weights)
    del stages["train@base-0"]
    YAML().dump({"stages": stages}, home / "dvc.lock")
    done = verify()
    assert (done.returncode, done.stdout) == (0, "10 equal, 0 different, 0 missing\n")
    stages["train@mix_grpo-2"]["outs"][0]["md5"] = "other"
    del stages["evaluate@dance_grpo-3"]
    YAML().dump({"stages": stages}, home / "dvc.lock")
    now = hashes_in(home / "dvc.lock")
    now.to_csv(home / "runs.txt", sep=" ")  # as after a run: the commit counts
    done = verify()
    assert done.returncode == 1 and done.stdout.splitlines() == [
        "mix_grpo-2 different code, settings, inputs, weights",
        "dance_grpo-3 missing",
        "8 equal, 1 different, 1 missing",
    ]
