"""Checkpoints: another number of processes goes on, and damage is said."""

import errno
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch

from g2rpo_core.distributed import checkpoint
from g2rpo_core.distributed.launcher import join_processes
from g2rpo_core.distributed.process_group import ALONE, ProcessGroup, join, num_processes
from tests.conftest import ROOT
from tests.fixtures.commands import run_module
from tests.fixtures.errors import refused
from tests.fixtures.waiting import HUNG


@pytest.fixture
def attempts(models, embeddings_folder, tmp_path):
    """attempts(how) -> what tests.fixtures.killed says of every attempt."""
    (tmp_path / "models").symlink_to(models)
    (tmp_path / "embeddings").symlink_to(embeddings_folder)

    def attempts(*words: object) -> list[dict]:
        done = run_module("tests.fixtures.killed", tmp_path, *words, OMP_NUM_THREADS="1")
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    return attempts


def end(folder: Path, name: str, rank: int = 0) -> dict:
    """The weights, moments and records that a process ended with."""
    found = torch.load(folder / f"end-{name}-{rank}.pt", weights_only=True)
    for record in found["records"]:
        del record["seconds"]
    return found


@pytest.mark.pipeline
def test_a_run_goes_on_with_another_number_of_processes(attempts, tmp_path):
    """Two began, SIGTERM ended them, one goes on: what two would have computed, to rounding."""
    _, terminated, resumed = attempts("stopped")
    assert terminated["ended"] == [143] and resumed["ended"] == [0]
    two, one = end(tmp_path, "uninterrupted"), end(tmp_path, "resumed")
    stopped = int(terminated["left"][-1].removeprefix("iteration-"))
    for number, (record, other) in enumerate(zip(two["records"], one["records"], strict=True)):
        exact = number <= stopped  # read from the checkpoint
        near = {"rel": 0, "abs": 0} if exact else {"rel": 1e-3, "abs": 1e-4}
        assert other == pytest.approx(record, **near), number
    pairs = zip(two["weights"], one["weights"], strict=True)
    moved = torch.cat([(a - b).flatten() for a, b in pairs])
    assert moved.abs().mean() < 1e-5
    assert not (tmp_path / "end-resumed-1.pt").exists()


def state(value: float) -> dict:
    weight = torch.full((9, 3), value)
    return {
        "weights": {"one": weight},
        "moments": {"one": {"exp_avg": weight / 2, "step": torch.tensor(value)}},
    }


def written(folder, iterations, keep=1) -> Path:
    """The newest of the checkpoints that were written."""
    kept = checkpoint.Checkpoints(folder, keep)
    for iteration in iterations:
        kept.save(iteration, state(iteration), [{"iteration": iteration}])
    kept.finish()
    return checkpoint.checkpoints(folder)[-1]


@pytest.mark.parametrize("harm", ["truncated", "missing", "flipped", "records", "manifest"])
def test_a_damaged_checkpoint_is_refused_in_words(here, harm):
    path = written(checkpoint.ROOT, [3])
    part = path / {"records": checkpoint.RECORDS, "manifest": checkpoint.MANIFEST}.get(
        harm, "__0_0.distcp"
    )
    data = part.read_bytes()
    match harm:
        case "missing":
            part.unlink()
        case "flipped":  # in the midst of the tensors
            part.write_bytes(data[:-20] + bytes([data[-20] ^ 1]) + data[-19:])
        case _:
            part.write_bytes(data[:-1])
    with refused("-000003: is damaged .*; delete .*-000003, and the same command resumes"):
        checkpoint.load_records(path)


def test_retention_keeps_the_newest(tmp_path):
    written(tmp_path, range(1, 6), keep=2)
    kept = checkpoint.checkpoints(tmp_path)
    assert [checkpoint.load_records(path) for path in kept] == [
        [{"iteration": 4}],
        [{"iteration": 5}],
    ]
    for path, value in zip(kept, (4.0, 5.0)):
        checkpoint.load_state(path, found := state(0.0))
        torch.testing.assert_close(found, state(value), rtol=0, atol=0)


def test_what_is_written_is_the_state_when_it_was_asked_for(tmp_path):
    """Training goes on while a checkpoint is written."""
    kept, moving = checkpoint.Checkpoints(tmp_path, 1), {"weights": {"one": torch.zeros(2_000_000)}}
    kept.save(1, moving, [{"iteration": 1}])
    moving["weights"]["one"].add_(1)
    kept.finish()
    checkpoint.load_state(
        tmp_path / "iteration-000001", found := {"weights": {"one": torch.ones(2_000_000)}}
    )
    assert not found["weights"]["one"].any()


def test_a_checkpoint_that_cannot_be_written_is_one_line_and_keeps_the_one_before(tmp_path):
    """The system takes no more than 100 kB a file, as a full disk would."""
    (tmp_path / "iteration-000000.gone").mkdir()  # a deletion that was killed
    before, kept = written(tmp_path, [1]), checkpoint.Checkpoints(tmp_path, 1)
    assert not (tmp_path / "iteration-000000.gone").exists()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        kept.save(2, {"weights": {"one": torch.zeros(1000, 1000)}}, [])
        with refused("-000002.tmp cannot be written: .*; the previous checkpoint is kept"):
            kept.finish()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert checkpoint.checkpoints(tmp_path) == [before] and checkpoint.load_records(before) == [
        {"iteration": 1}
    ]


def test_a_run_goes_on_with_other_processes_but_never_with_other_settings_or_inputs(
    here, tiny, monkeypatch, capsys
):
    file = here / "models.lock.json"
    file.write_text("1")
    folder = lambda training: checkpoint.scratch(
        "train", "tiny/g2rpo-1", {"training": training}, [file]
    )
    first = folder(tiny.training)
    assert folder(tiny.training) == first and not capsys.readouterr().err
    kept = tiny.training.model_copy(
        update={"checkpoints": tiny.training.checkpoints.model_copy(update={"every": 7})}
    )
    assert folder(kept) == first  # how often is written down decides nothing
    other = folder(tiny.training.model_copy(update={"learning_rate": 1.0}))
    assert other != first
    assert (
        "is not resumed: training.learning_rate changed; it can be deleted"
        in capsys.readouterr().err
    )
    file.write_text("2")
    assert folder(tiny.training) not in (first, other)
    assert f"content of {file.parent.name}/{file.name}" in capsys.readouterr().err
    file.write_text("1")
    monkeypatch.setattr(ProcessGroup, "gather", lambda self, value: [value] * self.size)
    again = checkpoint.scratch(
        "train", "tiny/g2rpo-1", {"training": tiny.training}, [file], ProcessGroup(0, 2)
    )
    assert again == first  # another number of processes goes on


NODE = """
import atexit, os, sys
from datetime import timedelta
import torch.distributed as dist
from g2rpo_core.distributed import checkpoint
from g2rpo_core.distributed.process_group import ALONE, ProcessGroup
from stages.entry import ends_in_one_line

rank, meet, checkpoint.VISIBLE_WITHIN = int(sys.argv[1]), sys.argv[2], 1.0
dist.init_process_group(
    "gloo", init_method=f"file://{meet}", rank=rank, world_size=2, timeout=timedelta(minutes=10)
)
atexit.register(dist.destroy_process_group)


@ends_in_one_line
def main():
    processes = ProcessGroup(rank, 2)
    checkpoint.claim("train", "run", processes)
    print(checkpoint.scratch("train", "run", {}, [], processes).resolve())


main()
"""


@pytest.mark.pipeline
@pytest.mark.parametrize(
    "environment, asked, message",
    [
        ({"RANK": "0"}, 4, "processes: 4 asked for, but 2 were started"),
        # With the launcher's own store, restarted processes wait at the addresses of the dead
        (
            {"TORCHELASTIC_MAX_RESTARTS": "3", "TORCHELASTIC_USE_AGENT_STORE": "True"},
            "auto",
            "needs --rdzv_backend c10d, and TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1",
        ),
    ],
)
def test_two_processes_that_are_not_as_a_run_needs_them_are_refused(
    monkeypatch, environment, asked, message
):
    for name, value in {"WORLD_SIZE": "2", **environment}.items():
        monkeypatch.setenv(name, value)
    with refused(message):
        join(asked)


@pytest.mark.parametrize("shared", [True, False])
def test_nodes_without_a_shared_disk_are_told_so_at_the_start(tmp_path, shared):
    """Two processes in two folders, as on two nodes: each its own, or both the same by a link."""
    (tmp_path / "node0").mkdir()
    (tmp_path / "node1").symlink_to("node0") if shared else (tmp_path / "node1").mkdir()
    children = [
        subprocess.Popen(
            [sys.executable, "-c", NODE, str(rank), str(tmp_path / "meet")],
            cwd=tmp_path / f"node{rank}",
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for rank in range(2)
    ]
    for child in children:
        out, err = child.communicate(timeout=HUNG)
        if shared:
            assert child.returncode == 0 and out.startswith(str(tmp_path / "node0")), err
        else:
            assert child.returncode == 1 and err.startswith("error: ") and err.count("\n") == 1
            assert "the project's folder must be on a disk that all nodes share" in err


HOLDER = """
import sys, time
from g2rpo_core.distributed import checkpoint
checkpoint.claim("train", "run")
print("held", flush=True)
time.sleep(600)
"""


@pytest.mark.pipeline
def test_a_second_run_is_refused_while_the_first_lives_and_not_once_it_is_killed(here):
    child = subprocess.Popen(
        [sys.executable, "-c", HOLDER],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    try:
        assert child.stdout.readline() == "held\n"
        with refused(
            f"train of run is already running \\(process {child.pid} on .*\\): wait until"
        ):
            checkpoint.claim("train", "run")
        checkpoint.claim("train", "another")
        checkpoint.claim("evaluate", "run")
    finally:
        child.kill()
        child.wait()
    checkpoint.claim("train", "run")
    checkpoint.claim("train", "run")  # its own claim is in nobody's way


def test_what_is_published_stays_in_scratch_until_all_is_finished(tmp_path):
    (tmp_path / "out" / "deep").mkdir(parents=True)
    (tmp_path / "out" / "deep" / "file").write_text("new")
    for _ in range(2):  # as by a process that was killed after the first
        (tmp_path / "there").mkdir(exist_ok=True)
        (tmp_path / "there" / "old").write_text("old")
        checkpoint.publish(tmp_path / "out", tmp_path / "there")
        assert [path.name for path in (tmp_path / "there").rglob("*")] == ["deep", "file"]
    assert (tmp_path / "out" / "deep" / "file").read_text() == "new"


def test_too_small_a_disk_is_told_before_the_work(here):
    checkpoint.check_room(1, "training run")
    with refused("run needs 1048576.0 GiB, and the disk of .* has .* free: make room"):
        checkpoint.check_room(2**50, "training run")


def test_auto_takes_as_many_gpus_as_share_the_prompts_evenly(monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 8)
    assert [num_processes("auto", prompts) for prompts in (16, 12, 7, 1)] == [8, 6, 7, 1]
    assert num_processes("auto") == 8


def test_a_launcher_that_kills_before_the_grace_is_over_is_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    message = (
        "grace is 120 s, but the launcher kills its processes 30 s after SIGTERM: "
        "export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=135"
    )
    with refused(message):
        join_processes(1, None, 120.0)
    monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "135")
    monkeypatch.setattr(
        "g2rpo_core.distributed.process_group.die_with_parent", lambda *launcher: None
    )
    assert join_processes(1, None, 120.0)[0] == ALONE


def test_a_checkpoint_that_torch_refuses_is_refused_in_one_line(tmp_path):
    """Torch's exception is no Exception, and its text a traceback of every process."""
    path = written(tmp_path, [3])
    (path / "__0_0.distcp").write_bytes(b"")
    with refused("iteration-000003: cannot be read: it is damaged"):
        checkpoint.load_state(path, state(0.0))


def test_a_checkout_that_is_mounted_elsewhere_resumes(here):
    """An input is named by its folder: whatever is above that may be mounted elsewhere."""
    file = here / "models" / "tiny" / "models.lock.json"
    file.parent.mkdir(parents=True)
    file.write_text("1")
    first = checkpoint.scratch("train", "run", {}, [file, file.parent])
    elsewhere = here / "mounted" / "models" / "tiny"
    shutil.copytree(file.parent, elsewhere)
    assert checkpoint.scratch("train", "run", {}, [elsewhere / file.name, elsewhere]) == first


@pytest.mark.parametrize("there", [True, False])
def test_an_output_that_is_a_symlink_to_another_disk_gets_the_new_one(tmp_path, there):
    """The link stays, and nothing of the old output does."""
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "new").write_text("new")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as disk:
        assert Path(disk).stat().st_dev != tmp_path.stat().st_dev
        (tmp_path / "there").symlink_to(Path(disk, "there"))
        if there:
            Path(disk, "there").mkdir()
            Path(disk, "there", "old").write_text("old")
        checkpoint.publish(tmp_path / "out", tmp_path / "there")
        assert (tmp_path / "there").is_symlink() and [
            path.name for path in (tmp_path / "there").iterdir()
        ] == ["new"]
        assert [path.name for path in Path(disk).iterdir()] == ["there"]


def test_an_output_that_cannot_be_replaced_keeps_what_it_has(tmp_path, monkeypatch):
    """Nothing of the new one is put into the old one."""
    for name in ("out", "there"):
        (tmp_path / name).mkdir()
        (tmp_path / name / name).write_text("")

    def refuse(path, target):
        raise OSError(errno.EBUSY, "Device or resource busy")

    monkeypatch.setattr(Path, "rename", refuse)
    with refused(r"there: cannot be replaced \(Device or resource busy\): remove it"):
        checkpoint.publish(tmp_path / "out", tmp_path / "there")
    assert [path.name for path in (tmp_path / "there").iterdir()] == ["there"] and (
        tmp_path / "out" / "out"
    ).exists()


def test_a_disk_without_locks_is_warned_of_and_used(here, monkeypatch, capsys):
    def flock(handle, how):
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr("fcntl.flock", flock)
    checkpoint.claim("train", "tiny/g2rpo-1")
    said = capsys.readouterr().err
    assert said.startswith("warning: the disk of ") and "(flock)" in said and said.count("\n") == 1
