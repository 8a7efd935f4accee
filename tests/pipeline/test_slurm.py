"""What params.yaml names, as jobs of a real Slurm with two nodes, from nothing to the report."""

import fcntl
import re
import subprocess
import sys
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from tests.fixtures.projects import git, seconds_checkout
from tests.fixtures.slurm import small_slurm
from tests.fixtures.waiting import until

pytestmark = pytest.mark.slow
ONE = ["--gpus-per-node", "1", "--cpus", "2", "--mem", "6G"]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """The environment of a Slurm, and a checkout whose path has a space and a quote."""
    folder = tmp_path_factory.mktemp("it's a cluster")
    with small_slurm(tmp_path_factory.mktemp("slurm")) as environment:
        project = folder / "check out"
        project.mkdir()
        seconds_checkout(project)
        file = project / "profiles" / "seconds.yaml"
        profile = YAML(typ="safe").load(file)
        profile["models"] |= {"pickscore": None, "image_reward": None}
        profile["training"] |= {
            "processes": "auto",
            "prompts_per_iteration": 2,
            "snapshots": [],
            "checkpoints": {"every": 1},
        }
        profile["evaluation"] = {
            "processes": "auto",
            "steps": [2],
            "diversity": None,
            "rewards": ["hps", "clip_score", "verifier"],
            "checkpoints": ["final"],
        }
        YAML().dump(profile, file)
        git(project, "add", "--all")
        yield project, {**environment, "DVC_NO_ANALYTICS": "1", "OMP_NUM_THREADS": "1"}


def g2rpo(cluster, *words: str) -> subprocess.CompletedProcess:
    project, environment = cluster
    return subprocess.run(
        [sys.executable, "-m", "g2rpo_core.cli", *words],
        cwd=project,
        env=environment,
        capture_output=True,
        text=True,
    )


def logs(project: Path) -> str:
    return "\n".join(
        f"== {log.name}\n{log.read_text()[-4000:]}"
        for log in sorted((project / ".cache/jobs").glob("*.log"))
    )


def wait(cluster) -> str:
    """Return all logs once the queue is empty."""
    project, environment = cluster
    squeue = ["squeue", "--noheader"]
    until(
        lambda: (
            not subprocess.run(
                squeue, env=environment, capture_output=True, text=True, check=True
            ).stdout.strip()
        ),
        1500,
    )
    return logs(project)


def test_a_campaign_runs_from_models_to_report_and_nothing_of_it_twice(cluster):
    """Two runs and the base at the same time on one machine, each beside the others' processes."""
    project, _ = cluster
    done = g2rpo(cluster, "launch", "--submit", *ONE)
    assert done.returncode == 0, done.stderr
    assert re.findall(r"seconds-(.*)\.sbatch: job \d+", done.stdout) == [
        "prepare",
        "base-0",
        "g2rpo-7",
        "g2rpo_two-7",
        "report",
    ]
    again = g2rpo(cluster, "launch", "--submit", *ONE)
    # The first jobs may have ended by now, and then have no line
    assert "seconds-report.sbatch: is already job" in again.stdout, again.stdout + again.stderr
    assert "sbatch: job" not in again.stdout
    assert "pending (dependency)" in g2rpo(cluster, "jobs").stdout.lower()
    said = wait(cluster)
    assert (project / "reports" / "report.html").exists(), said
    for stage in ("train@g2rpo-7", "evaluate@g2rpo_two-7", "evaluate_base"):
        assert said.count(f"dvc status knows this run as {stage}") == 1, said
    assert "ended" in g2rpo(cluster, "jobs").stdout
    done = g2rpo(cluster, "launch", "--submit", *ONE)
    assert done.stdout == "" and "everything that params.yaml names is up to date" in done.stderr, (
        done.stdout + done.stderr
    )


@pytest.mark.engines
def test_a_run_on_two_nodes_leaves_what_dvc_knows(cluster):
    project, _ = cluster
    (project / "params.yaml").write_text(
        "profile: seconds\nmethods: [g2rpo, g2rpo_two]\nseeds: [7, 8]\npublished: []\n"
    )
    first = [] if (project / "models" / "seconds").exists() else ["prepare"]
    done = g2rpo(
        cluster, "launch", "--method", "g2rpo", "--seed", "8", "--nodes", "2", "--submit", *ONE
    )
    assert done.returncode == 0 and re.findall(r"seconds-(.*)\.sbatch: job", done.stdout) == [
        *first,
        "g2rpo-8",
    ], done.stdout + done.stderr
    said = wait(cluster)
    for stage in ("train", "evaluate"):
        assert said.count(f"dvc status knows this run as {stage}@g2rpo-8") == 1, said


@pytest.mark.engines
def test_an_error_that_only_the_user_can_fix_is_not_tried_again(cluster):
    """The launcher would start the processes three times more."""
    project, environment = cluster
    done = g2rpo(cluster, "launch", "--method", "g2rpo_two", "--seed", "8", *ONE)
    job = project / done.stdout.strip()
    held = project / ".cache/resume/train/seconds/g2rpo_two-8.lock"
    with held.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        subprocess.run(
            ["sbatch", str(job.relative_to(project))], cwd=project, env=environment, check=True
        )
        wait(cluster)
    said = job.with_suffix(".log").read_text()
    assert (
        re.findall(r"^error: ", said, re.MULTILINE) == ["error: "]
        and "train of seconds/g2rpo_two-8 is already running" in said
    ), said
