import shutil
from functools import partial
from pathlib import Path

from ruamel.yaml import YAML

from g2rpo_core.foundation.runs import hash_of
from studies import __main__ as studies
from studies.committed import hashes_in
from tests.conftest import ROOT
from tests.fixtures.commands import run_here
from tests.fixtures.projects import git


def stage(home: Path, out: str) -> dict:
    """Make an output, and what DVC's lock says of its stage."""
    (home / out).mkdir(parents=True)
    (home / out / "made").write_text(out)
    code = {"path": "../../g2rpo_core/algorithm", "md5": "c"}
    return {
        "deps": [code, {"path": "../../models/tiny", "md5": "m"}],
        "params": {"reports/profile.yaml": {"eta": 0.7}},
        "outs": [{"path": out, "md5": hash_of(home / out)}],
    }


def test_verify_compares_what_is_here_with_the_committed_lines(tmp_path):
    home = tmp_path / "studies" / "steps"
    home.mkdir(parents=True)
    (tmp_path / "profiles").symlink_to(ROOT / "profiles")
    for file in ("params.yaml", "runs.txt"):
        shutil.copy(ROOT / "studies" / "steps" / file, home)
    verify = partial(run_here, studies.main, "verify", "steps", folder=tmp_path)
    said = "error: studies/steps was not run here: python -m studies run steps\n"
    assert verify().stderr == said
    stages = {"evaluate_base": stage(home, "evaluations/base-0")}
    for line in (home / "runs.txt").read_text().splitlines()[2:]:
        run = line.split()[0]
        stages[f"train@{run}"] = stage(home, f"runs/{run}")
        stages[f"evaluate@{run}"] = stage(home, f"evaluations/{run}")
    YAML().dump({"stages": stages}, home / "dvc.lock")
    hashes_in(home / "dvc.lock").to_csv(home / "runs.txt", sep=" ")
    for words in (["init"], ["add", "-A"], ["commit", "-m", "first"]):
        git(tmp_path, *words)
    done = verify()
    assert (done.returncode, done.stdout) == (0, "10 equal, 0 different, 0 missing\n")
    # DVC's lock says nothing of a damaged file that its cache gave back
    (home / "runs" / "mix_grpo-2" / "made").write_text("damaged")
    shutil.rmtree(home / "evaluations" / "dance_grpo-3")
    stages["train@mix_grpo-1"]["params"] = {"reports/profile.yaml": {"eta": 0.8}}
    YAML().dump({"stages": stages}, home / "dvc.lock")
    hashes_in(home / "dvc.lock").to_csv(home / "runs.txt", sep=" ")  # the commit counts
    done = verify()
    assert done.returncode == 1 and done.stdout.splitlines() == [
        "mix_grpo-2 different weights",
        "dance_grpo-3 missing",
        "8 equal, 1 different, 1 missing",
    ]
