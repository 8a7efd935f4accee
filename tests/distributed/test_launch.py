"""Stages with several processes, started and killed as a user does it: the same results."""

import importlib
import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path
from unittest.mock import patch

import pandas as pd
import psutil
import pytest
import torch
from diffusers import FluxTransformer2DModel
from ruamel.yaml import YAML

from g2rpo_core.foundation.manifest import describe_files
from g2rpo_core.foundation.runs import hash_of
from tests.conftest import ROOT
from tests.fixtures.commands import run_here
from tests.fixtures.projects import link_made
from tests.fixtures.waiting import HUNG, free_port, until

pytestmark = pytest.mark.pipeline

REWARD = '''
import time

class Redness:
    """Notes in `scored.txt` how many images it was given, and takes its time."""

    def score(self, images, prompts):
        with open("scored.txt", "a") as file:
            print(len(images), file=file)
        time.sleep(0.3)
        return images[:, 0].mean((1, 2)) - images[:, 1:].mean((1, 2, 3))
'''


AWAY = """
import os, time
from g2rpo_core.foundation.errors import TransientError

class Away:
    def score(self, images, prompts):
        if os.environ["RANK"] == "1":
            raise TransientError("nobody answered process 1")
        time.sleep(600)
        open("woke", "w").close()
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory, models, embeddings_folder) -> Path:
    """What earlier stages make, and profiles `one` and `two` by their number of processes."""
    folder = tmp_path_factory.mktemp("processes")
    (folder / "mine.py").write_text(REWARD)
    (folder / "profiles").mkdir()
    yaml = YAML()
    profile = yaml.load(ROOT / "profiles" / "tiny.yaml")
    profile["rewards"] = {"redness": {"class": "mine:Redness"}}
    monitor = {"every": 1, "prompts": 4, "rewards": ["redness"]}
    profile["training"] |= {
        "iterations": 2,
        "prompts_per_iteration": 2,
        "num_generations": 2,
        "rewards": {"redness": 1.0},
        "monitor": monitor,
    }
    profile["evaluation"] |= {
        "steps": [2],
        "batch": 4,
        "rewards": ["redness", "verifier"],
        "diversity": None,
    }
    for name, processes in {"one": 1, "two": 2}.items():
        profile["training"]["processes"] = profile["evaluation"]["processes"] = processes
        yaml.dump(profile, folder / "profiles" / f"{name}.yaml")
    link_made(folder, "two", models, embeddings_folder)
    link(folder, "one")
    return folder


def link(folder: Path, name: str) -> None:
    """Give profile `name` the models and embeddings of `two`."""
    for made in ("models", "embeddings"):
        (folder / made / name).symlink_to("two")


def variant(folder: Path, name: str, code: str = "", **training: object) -> None:
    """Add a profile like `two`, with a reward class of its own name if there is code for it."""
    profile = YAML(typ="safe").load(folder / "profiles" / "two.yaml")
    profile["training"] |= training
    if code:
        (folder / f"{name}.py").write_text(code)
        profile["rewards"]["redness"]["class"] = f"{name}:{name.title()}"
    YAML().dump(profile, folder / "profiles" / f"{name}.yaml")
    link(folder, name)


def weights(run: Path) -> dict[str, torch.Tensor]:
    return FluxTransformer2DModel.from_pretrained(run / "transformer").state_dict()


def environment(folder: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": f"{folder}:{ROOT}", "OMP_NUM_THREADS": "1"}


def start(
    folder: Path, profile: str, stage: str, method: str = "g2rpo", seed: int = 1
) -> subprocess.Popen:
    words = ["--profile", profile, "--method", method, "--seed", str(seed)]
    return subprocess.Popen(
        [sys.executable, "-m", f"stages.{stage}", *words],
        cwd=folder,
        env=environment(folder),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def run(folder: Path, *words: str) -> None:
    child = start(folder, *words)
    output, _ = child.communicate()
    assert child.returncode == 0, output


def run_alone(folder: Path, stage: str, method: str = "g2rpo", seed: int = 1) -> None:
    """The stage of profile `one`, in this process."""
    words = ["--profile", "one", "--method", method, "--seed", str(seed)]
    with patch.object(sys, "path", [str(folder), *sys.path]):
        done = run_here(importlib.import_module(f"stages.{stage}").main, *words, folder=folder)
    assert done.returncode == 0, done.stderr


def test_two_processes_train_and_evaluate_as_one(folder):
    run_alone(folder, "train")
    run(folder, "two", "train")
    base = weights(folder / "models" / "one" / "pipeline")
    one, two = (weights(folder / "runs" / profile / "g2rpo-1") for profile in ("one", "two"))
    # Adam's first steps are of the learning rate's size whatever the gradient's: where that is
    # rounding alone, so is its sign
    far = sum((one[name] - two[name]).square().sum().item() for name in one) ** 0.5
    moved = sum((one[name] - base[name]).square().sum().item() for name in one) ** 0.5
    assert moved > 0 and far < 0.05 * moved
    columns = ["num_forward_evals", "num_transitions", "reward_redness", "loss", "grad_norm"]
    pd.testing.assert_frame_equal(
        *(
            pd.read_parquet(folder / "runs" / profile / "g2rpo-1" / "records.parquet")[
                [*columns, "heldout_redness"]
            ]
            for profile in ("one", "two")
        ),
        rtol=1e-3,
        atol=1e-5,
    )
    run_alone(folder, "evaluate", "base", 0)
    run(folder, "two", "evaluate", "base", 0)
    one, two = (folder / "evaluations" / name / "base-0" for name in ("one", "two"))
    pictures = describe_files(one / "pictures")
    assert len(pictures) == 24 and pictures == describe_files(two / "pictures")
    tables = (pd.read_parquet(each / "results.parquet") for each in (one, two))
    pd.testing.assert_frame_equal(*tables, check_exact=True)


def test_a_finished_run_that_dvc_did_not_take_is_not_trained_again(folder, monkeypatch):
    """DVC deletes outputs that it does not know; once it evaluates a run, it has taken it."""
    trained, scored = folder / "runs" / "one" / "g2rpo-5", folder / "scored.txt"
    monkeypatch.setenv("DVC_STAGE", "train@g2rpo-5")
    run_alone(folder, "train", "g2rpo", 5)
    whole, asked = hash_of(trained), scored.read_text()
    shutil.rmtree(trained)
    run_alone(folder, "train", "g2rpo", 5)
    assert hash_of(trained) == whole and scored.read_text() == asked
    run_alone(folder, "evaluate", "g2rpo", 5)
    (kept,) = (folder / ".cache/resume/train/one/g2rpo-5").glob("*")  # for a longer run
    assert len(list(kept.glob("iteration-*"))) == 1 and hash_of(trained) == whole


def test_one_process_that_fails_ends_all_with_its_own_error_and_status(folder):
    """75, after which flows try again, and not accelerate's 1."""
    variant(folder, "away", AWAY)
    child = start(folder, "away", "evaluate", "base", 0)
    output, _ = child.communicate()
    assert child.returncode == 75 and "error: nobody answered process 1" in output
    assert not (folder / "woke").exists()  # process 0 was not waited for


@pytest.mark.skipif(
    sys.platform != "linux", reason="the kernel's signal at a parent's death is Linux's"
)
def test_no_process_outlives_the_stage_that_was_killed(folder):
    """SIGKILL to the stage alone, while its processes train."""
    child = start(folder, "two", "train", seed=2)
    started: list[psutil.Process] = []

    def working() -> bool:
        started[:] = psutil.Process(child.pid).children(recursive=True)
        return sum("stages.train" in one.cmdline() for one in started) == 3 and any(
            one.memory_info().rss > 300e6 for one in started
        )

    until(working, running=[child])
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    assert psutil.wait_procs(started, timeout=HUNG)[1] == []


def node(folder: Path, port: int) -> subprocess.Popen:
    """One of two machines with a process each."""
    launch = [sys.executable, "-m", "pipeline.launch", "train", "--profile", "again"]
    where = ["--nodes", "2", "--gpus-per-node", "1", "--endpoint", f"127.0.0.1:{port}"]
    with (folder / f"node-{port}.log").open("a") as log:
        return subprocess.Popen(
            [*launch, *where, "--method", "g2rpo", "--seed", "1"],
            cwd=folder,
            env=environment(folder),
            stdout=log,
            stderr=log,
        )


def dies(machine: subprocess.Popen) -> None:
    """With all that runs on it, at once."""
    for process in [
        *psutil.Process(machine.pid).children(recursive=True),
        psutil.Process(machine.pid),
    ]:
        process.kill()
    machine.wait()


@pytest.mark.slow
def test_a_run_goes_on_by_itself_when_one_of_two_nodes_died_and_came_back(folder):
    """From the last checkpoint to the bits of a run left alone; node 0 is not started again."""
    variant(folder, "again", iterations=6, checkpoints={"every": 1})
    run(folder, "again", "train")
    made = folder / "runs" / "again" / "g2rpo-1"
    made.rename(folder / "left-alone")
    port = free_port()
    nodes = [node(folder, port)]
    try:
        # On one machine, the first must have the port before the second looks for it
        until(lambda: answers(port), running=nodes)
        nodes.append(node(folder, port))
        until(
            lambda: any((folder / ".cache/resume/train/again").glob("**/iteration-000002")),
            running=nodes,
        )
        dies(nodes[1])
        nodes[1] = node(folder, port)
        assert [machine.wait(600) for machine in nodes] == [0, 0], (
            folder / f"node-{port}.log"
        ).read_text()[-3000:]
    finally:
        for machine in nodes:
            if machine.poll() is None:
                dies(machine)
    alone, resumed = (
        pd.read_parquet(run / "records.parquet") for run in (folder / "left-alone", made)
    )
    pd.testing.assert_frame_equal(alone, resumed, check_exact=True)
    alone, resumed = (weights(run) for run in (folder / "left-alone", made))
    assert all(torch.equal(alone[name], resumed[name]) for name in alone)


def answers(port: int) -> bool:
    with socket.socket() as asking:
        return asking.connect_ex(("127.0.0.1", port)) == 0
