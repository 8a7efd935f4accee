"""A Prefect server on loopback, and `python -m flows.serve` against it in a small repository."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from unittest.mock import patch

import httpx
import pytest

from flows.server import answers
from tests.fixtures.waiting import HUNG, free_port, until
from tests.flows.tiny import environment, repository

SCHEDULES = ("--train", "", "--evaluate", "7 * * * *", "--timezone", "Europe/Berlin")
KEY = "g2rpo:of the tests"
# One for all requests: to make a client takes longer than Prefect's answer. No connection is kept,
# for servers that are killed
CLIENT = httpx.Client(timeout=HUNG, limits=httpx.Limits(max_keepalive_connections=0))
# To answer costs the server more than a tenth of a second on a slow machine
poll = partial(until, every=0.5)
FINAL = ("COMPLETED", "FAILED", "CRASHED", "CANCELLED")


@dataclass
class Served:
    """A server, the flows served in `folder`, and what the server's API says of them."""

    folder: Path
    port: int = field(default_factory=free_port)
    key: str = KEY
    processes: dict[str, subprocess.Popen] = field(default_factory=dict)

    @property
    def api(self) -> str:
        return f"http://127.0.0.1:{self.port}/api"

    @property
    def auth(self) -> tuple[str, ...]:
        return tuple(self.key.split(":"))

    def start_server(self, host: str = "127.0.0.1") -> None:
        words = ["-m", "prefect", "server", "start", "--host", host, "--port", str(self.port)]
        process = self.processes["server"] = subprocess.Popen(
            [sys.executable, *words], stdout=subprocess.DEVNULL, start_new_session=True
        )
        until(lambda: answers(self.api), running=[process], every=0.5)

    def serve(self) -> None:
        command = [sys.executable, "-m", "flows.serve", *SCHEDULES, "--side-by-side", "3"]
        log = (self.folder.parent / "serve.log").open("ab")
        self.processes["serve"] = subprocess.Popen(
            command,
            cwd=self.folder,
            env=environment(PREFECT_API_URL=self.api),
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        last = f"{self.api}/deployments/name/report/g2rpo"
        poll(lambda: CLIENT.get(last, auth=self.auth).status_code == 200)

    def ask(self, method: str, path: str, **options):
        """Asks again while SQLite is busy (503), as Prefect's own client does."""
        ask = lambda: CLIENT.request(method, f"{self.api}{path}", auth=self.auth, **options)
        return (
            poll(
                lambda: (answer := ask()).status_code != httpx.codes.SERVICE_UNAVAILABLE and answer
            )
            .raise_for_status()
            .json()
        )

    def get(self, path: str) -> dict:
        return self.ask("GET", path)

    def post(self, path: str, **body):
        return self.ask("POST", path, json=body)

    def start(self, flow: str, **parameters) -> str:
        """The id of a new run of a deployment."""
        deployment = self.get(f"/deployments/name/{flow}/g2rpo")["id"]
        return self.post(
            f"/deployments/{deployment}/create_flow_run",
            parameters=parameters,
            state={"type": "SCHEDULED"},
        )["id"]

    def ended(self, run: str) -> dict:
        """The final state of a run."""
        return poll(
            lambda: (state := self.get(f"/flow_runs/{run}")["state"])["type"] in FINAL and state
        )

    def run(self, flow: str, **parameters) -> tuple[str, dict]:
        run = self.start(flow, **parameters)
        return run, self.ended(run)

    def of_run(self, kind: str, run: str) -> list[dict]:
        return self.post(f"/{kind}/filter", flow_runs={"id": {"any_": [run]}}, limit=200)

    def tasks(self, run: str) -> dict[str, dict]:
        """Task runs by the name of their stage, once all that have started have ended."""

        def found() -> dict:
            tasks = {task["name"]: task for task in self.of_run("task_runs", run)}
            ready = all(task["state"]["type"] in (*FINAL, "PENDING") for task in tasks.values())
            return tasks if ready else {}

        return poll(found)

    def log(self, run: str) -> list[str]:
        return [
            line["message"]
            for line in self.post("/logs/filter", logs={"flow_run_id": {"any_": [run]}}, limit=200)
        ]


@contextmanager
def running(served: Served) -> Iterator[Served]:
    """At the end, none of its processes is left."""
    try:
        yield served
    finally:
        for process in reversed(served.processes.values()):
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@pytest.fixture(scope="module")  # a session's would poll, and start its schedule, to the last test
def served(tmp_path_factory) -> Iterator[Served]:
    """All flows, `evaluate` by cron every hour, on a server with its own SQLite file."""
    folder = tmp_path_factory.mktemp("flows")
    settings = {
        "PREFECT_HOME": str(folder / "prefect"),
        "PREFECT_RUNNER_POLL_FREQUENCY": "1",
        "PREFECT_API_SERVICES_SCHEDULER_LOOP_SECONDS": "5",
        "PREFECT_PROFILES_PATH": str(folder / "profiles.toml"),
        "PREFECT_SERVER_API_AUTH_STRING": KEY,
        "PREFECT_API_AUTH_STRING": KEY,
    }
    with (
        patch.dict(os.environ, settings),
        running(Served(repository(folder / "project"))) as served,
    ):
        served.start_server()
        served.serve()
        yield served
