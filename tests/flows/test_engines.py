"""The flows as a group runs them: Prefect's server on PostgreSQL, workers in two checkouts."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

import psutil
import pytest

from flows.server import stop_server
from tests.conftest import ROOT
from tests.fixtures.commands import run_module
from tests.fixtures.waiting import HUNG, until
from tests.flows.conftest import KEY, Served, free_port, poll, running
from tests.flows.tiny import environment, repository

pytestmark = pytest.mark.slow

PROGRAMS = sorted(Path("/usr/lib/postgresql").glob("*/bin"))[-1:]


@dataclass
class Database:
    """A PostgreSQL server of its own with an empty database, not run by root."""

    address: str
    start: Callable[[], subprocess.Popen]
    wait: Callable[[], None]
    server: subprocess.Popen | None = None

    def begin(self) -> None:
        self.server = self.start()
        self.wait()

    def kill(self) -> None:
        """All of its processes at once, as with a machine that dies."""
        processes = [psutil.Process(self.server.pid)]
        processes += processes[0].children(recursive=True)
        for process in processes:
            process.kill()
        self.server.wait()


@pytest.fixture(scope="module")
def database() -> Iterator[Database]:
    if not PROGRAMS:
        pytest.skip("needs PostgreSQL's server")
    as_user = (
        {"user": "postgres", "group": "postgres", "extra_groups": []} if os.getuid() == 0 else {}
    )
    # pytest's own folders are closed to other users
    data, port = Path(tempfile.mkdtemp()), free_port()
    if as_user:
        shutil.chown(data, "postgres", "postgres")
    run = lambda program, *words: [str(PROGRAMS[0] / program), *words]
    subprocess.run(
        run("initdb", "--auth=trust", "--username=prefect", "--no-sync", str(data)),
        check=True,
        capture_output=True,
        cwd=data,
        **as_user,
    )
    start = lambda: subprocess.Popen(
        run("postgres", "-D", str(data), "-h", "127.0.0.1", "-p", str(port), "-k", str(data)),
        cwd=data,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        **as_user,
    )
    address = ["-h", "127.0.0.1", "-p", str(port), "-U", "prefect"]
    ready = lambda: subprocess.run(run("pg_isready", *address), capture_output=True).returncode == 0
    url = f"postgresql+asyncpg://prefect@127.0.0.1:{port}/prefect"
    database = Database(url, start, lambda: until(ready))
    try:
        database.begin()
        subprocess.run(run("createdb", *address, "prefect"), check=True, capture_output=True)
        yield database
    finally:
        stop_server(database.server, signal.SIGINT)
        shutil.rmtree(data)


@pytest.fixture(scope="module")
def group(database, tmp_path_factory) -> Iterator[Served]:
    """A server on PostgreSQL, and two checkouts that share results by a DVC remote."""
    folder = tmp_path_factory.mktemp("group")
    settings = {
        "PREFECT_HOME": str(folder / "prefect"),
        "PREFECT_PROFILES_PATH": str(folder / "profiles.toml"),
        "PREFECT_API_DATABASE_CONNECTION_URL": database.address,
        "PREFECT_API_SERVICES_SCHEDULER_LOOP_SECONDS": "5",
        "PREFECT_SERVER_API_AUTH_STRING": KEY,
        "PREFECT_API_AUTH_STRING": KEY,
    }
    with patch.dict(os.environ, settings), running(Served(repository(folder / "one"))) as served:
        dvc(served.folder, "remote", "add", "--default", "shared", str(folder / "remote"))
        shutil.copytree(served.folder, folder / "two", symlinks=True)
        yield served


def dvc(folder: Path, *words: str) -> None:
    run_module("dvc", *words, folder=folder, **environment()).check_returncode()


def start_worker(
    group: Served, folder: Path, flow: str, **parameters
) -> tuple[str, subprocess.Popen]:
    """Deploy for a checkout, ask for a run, and start a worker there for it."""
    own = environment(
        PREFECT_API_URL=group.api,
        G2RPO_CHECKOUT=str(folder),
        PREFECT_FLOWS_HEARTBEAT_FREQUENCY="30",
    )
    for command in (
        ["work-pool", "create", "g2rpo", "--type", "process", "--overwrite"],
        ["deploy", "--all"],
    ):
        done = run_module("prefect", "--no-prompt", *command, **own)
        assert done.returncode == 0, done.stdout + done.stderr
    deployment = group.get(f"/deployments/name/{flow}/worker")["id"]
    run = group.post(f"/deployments/{deployment}/create_flow_run", parameters=parameters)["id"]
    command = [
        sys.executable,
        "-m",
        "prefect",
        "--no-prompt",
        "worker",
        "start",
        "--pool",
        "g2rpo",
        "--run-once",
    ]
    log = (folder.parent / f"{folder.name}.log").open("ab")
    return run, subprocess.Popen(
        command, cwd=folder, env=own, stdout=log, stderr=log, start_new_session=True
    )


def states(group: Served, run: str) -> dict[str, str]:
    return {name: task["state"]["name"] for name, task in group.tasks(run).items()}


def test_one_machine_trains_and_another_evaluates_what_it_pulled(group):
    one, two = group.folder, group.folder.parent / "two"
    run, worker = start_worker(group, one, "reproduce", targets=["train"])
    until((one / "started").exists)
    # The server goes away in the middle and comes back
    group.kill_server()
    (one / "enough").touch()
    group.start_server()
    assert group.ended(run)["type"] == "COMPLETED"
    worker.wait(HUNG)
    assert states(group, run) == {"train@g2rpo-1": "Completed"}
    # The results go by the remote, the lock by whatever carries the repository
    dvc(one, "push")
    shutil.copy(one / "dvc.lock", two)
    dvc(two, "pull", "--allow-missing")
    run, worker = start_worker(group, two, "reproduce", targets=["evaluate"])
    assert group.ended(run)["type"] == "COMPLETED"
    worker.wait(HUNG)
    assert states(group, run) == {"train@g2rpo-1": "Skipped", "evaluate@g2rpo-1": "Completed"}
    assert (two / "scores").read_text() == "w" and not (two / "started").exists()


@pytest.mark.engines
def test_a_run_outlives_its_servers_database(group, database, tmp_path):
    """PostgreSQL is killed while a stage trains, and starts again before the stage has ended."""
    folder = repository(tmp_path / "five")
    run, worker = start_worker(group, folder, "reproduce", targets=["train"])
    until((folder / "started").exists)
    database.kill()
    # Some requests meet a server without a database
    time.sleep(15)
    assert worker.poll() is None
    database.begin()
    (folder / "enough").touch()
    assert group.ended(run)["type"] == "COMPLETED"
    worker.wait(HUNG)
    assert states(group, run) == {"train@g2rpo-1": "Completed"}


@pytest.mark.engines
def test_a_run_whose_machine_died_is_taken_over_from_its_last_checkpoint(group):
    """Both checkouts share the checkpoints; an automation says that the run is dead."""
    rule = ROOT / "flows" / "dead_runs.yaml"
    own = environment(PREFECT_API_URL=group.api)
    done = run_module("prefect", "automation", "create", "--from-file", rule, **own)
    assert done.returncode == 0, done.stdout + done.stderr
    shared = group.folder.parent / "checkpoints"
    shared.mkdir()
    machines = [group.folder.parent / name for name in ("three", "four")]
    for machine in machines:
        repository(machine)
        (machine / ".cache").mkdir()
        (machine / ".cache" / "resume").symlink_to(shared)
    run, worker = start_worker(group, machines[0], "reproduce", targets=["train"])
    until(lambda: (shared / "iteration").exists() and int((shared / "iteration").read_text()) > 5)
    poll(
        lambda: group.post(
            "/events/filter", filter={"event": {"name": ["prefect.flow-run.heartbeat"]}}
        )["events"],
        90,
    )
    for process in [
        *psutil.Process(worker.pid).children(recursive=True),
        psutil.Process(worker.pid),
    ]:
        process.kill()
    worker.wait()
    died_at = int((shared / "iteration").read_text())
    state = group.ended(run)
    assert state["type"] == "CRASHED" and "resumes from its checkpoint" in state["message"]
    (machines[1] / "enough").touch()
    run, worker = start_worker(group, machines[1], "reproduce", targets=["train"])
    assert group.ended(run)["type"] == "COMPLETED"
    worker.wait(HUNG)
    assert int((machines[1] / "began").read_text()) == died_at > 5
