"""The server that `python -m flows.serve` starts: who may use it, and what checkouts share."""

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil
import pytest

from flows.server import ACCESS, HOME, claim_home, wait_until_healthy
from g2rpo_core.foundation.errors import UserError
from tests.conftest import ROOT
from tests.fixtures.loopback import Handler, loopback
from tests.fixtures.waiting import HUNG, until
from tests.flows.conftest import CLIENT, Served, csrf_headers, free_port, poll
from tests.flows.tiny import environment, repository

pytestmark = pytest.mark.pipeline


def command(port: int) -> dict:
    """`flows.serve` as a user starts it: nothing of Prefect in the environment."""
    own = {key: value for key, value in environment().items() if not key.startswith("PREFECT_")}
    words = ["--train", "", "--evaluate", "", "--port", str(port)]
    return {
        "args": [sys.executable, "-m", "flows.serve", *words],
        "env": own | {"PREFECT_RUNNER_POLL_FREQUENCY": "1"},
    }


def refused_start(port: int, folder: Path) -> str:
    """The line with which `flows.serve` ends at once."""
    done = subprocess.run(**command(port), cwd=folder, capture_output=True, text=True, timeout=HUNG)
    assert done.returncode == 1 and done.stderr.count("\n") == 1, done.stderr
    return done.stderr


@contextmanager
def serving(folder: Path) -> Iterator[Served]:
    """A checkout in `folder` whose flows are served; its output is in serve.log beside it."""
    served, log = Served(repository(folder)), folder.parent / f"{folder.name}.log"
    with log.open("wb") as file:
        process = served.processes["serve"] = subprocess.Popen(
            **command(served.port), cwd=folder, stdout=file, stderr=file
        )
    try:
        until(lambda: "serving" in log.read_text(errors="replace"), running=[process])
        lines = dict(
            line.removeprefix("export ").split("=", 1)
            for line in (folder / HOME / ACCESS).read_text().splitlines()
        )
        served.key = lines["PREFECT_API_AUTH_STRING"]
        last = f"{served.api}/deployments/name/report/g2rpo"
        poll(
            lambda: CLIENT.get(last, auth=served.auth).status_code == 200,
            running=[process],
        )
        yield served
    finally:
        process.terminate()
        process.wait(HUNG)  # Prefect's client waits up to a minute for a database that is locked


@pytest.fixture(scope="module")
def served(tmp_path_factory) -> Iterator[Served]:
    with serving(tmp_path_factory.mktemp("own") / "one") as one:
        yield one


def test_who_has_no_key_can_neither_see_nor_change_nor_start_a_run(served):
    """Another user of the machine, or a page in a browser, would run commands as this user."""
    run = served.get("/deployments/name/report/g2rpo")["id"]
    steps = {
        "pull_steps": [{"prefect.deployments.steps.run_shell_script": {"script": "id > owned"}}]
    }
    calls = (
        ("POST", "/deployments/filter", {}),
        ("PATCH", f"/deployments/{run}", steps),
        ("POST", f"/deployments/{run}/create_flow_run", {}),
    )
    token = csrf_headers(served.api, served.auth)
    for method, path, body in calls:
        for auth in (None, ("g2rpo", "guessed")):
            answer = CLIENT.request(
                method, f"{served.api}{path}", json=body, headers=token, auth=auth
            )
            assert answer.status_code == 401, path
        assert (
            CLIENT.request(method, f"{served.api}{path}", json=body).status_code == 403
        )  # nor such a token
    assert CLIENT.get(f"{served.api}/csrf-token", params={"client": "x"}).status_code == 401
    assert not served.get(f"/deployments/{run}")["pull_steps"]
    assert served.run("report")[1]["type"] == "COMPLETED" and not (served.folder / "owned").exists()


def test_a_page_of_another_address_may_not_ask(served):
    asked = {
        "Access-Control-Request-Method": "PATCH",
        "Access-Control-Request-Headers": "authorization",
    }
    for origin, allowed in (
        ("https://evil.example", None),
        (f"http://localhost:{served.port}", f"http://localhost:{served.port}"),
    ):
        answer = httpx.options(
            f"{served.api}/deployments/x", headers={"Origin": origin, **asked}, timeout=HUNG
        )
        assert answer.headers.get("access-control-allow-origin") == allowed


def test_a_home_that_cannot_be_written_is_named(monkeypatch):
    monkeypatch.setenv("PREFECT_HOME", "/dev/null/prefect")
    with (
        pytest.raises(UserError, match="^/dev/null/prefect: cannot be written .* PREFECT_HOME"),
        claim_home(),
    ):
        pass


def test_the_key_is_in_a_file_of_this_user_that_opens_prefects_commands(served):
    file = served.folder / HOME / ACCESS
    assert file.stat().st_mode & 0o777 == 0o600 and file.parent.stat().st_mode & 0o777 == 0o700
    database = [path.stat().st_mode & 0o777 for path in file.parent.glob("prefect.db*")]
    assert database and set(database) == {0o600}
    log = served.folder.with_name(f"{served.folder.name}.log").read_text()
    assert (
        str(HOME / ACCESS) in log and served.key.split(":")[1] not in log and len(served.key) > 40
    )
    shell = f". {HOME / ACCESS} && {sys.executable} -m prefect deployment run report/g2rpo --watch"
    clean = command(0)["env"]
    done = subprocess.run(
        ["bash", "-c", shell],
        cwd=served.folder,
        env=clean,
        capture_output=True,
        text=True,
        timeout=HUNG,
    )
    assert done.returncode == 0 and "Completed" in done.stdout + done.stderr, (
        done.stdout + done.stderr
    )


def test_a_second_start_in_the_same_checkout_is_refused(served):
    told = refused_start(free_port(), served.folder)
    assert told.startswith("error: ") and "another `flows.serve` is using it" in told
    assert served.get("/deployments/name/report/g2rpo")["paused"] is False


def test_sigterm_ends_it_without_a_warning_of_prefects(tmp_path):
    with serving(tmp_path / "one") as one:
        one.run("report")  # the runner has installed its own handler by then
    said = (tmp_path / "one.log").read_text()
    assert one.processes["serve"].returncode == 128 + signal.SIGTERM
    assert "Warning" not in said and "Traceback" not in said, said
    assert "Pausing" in said


@pytest.mark.slow
def test_sigterm_ends_it_although_its_server_hangs(tmp_path):
    with serving(tmp_path / "one") as one:
        one.run("report")  # the runner is at work by then, and has no run
        server = psutil.Process(one.processes["serve"].pid).children(recursive=True)
        for process in server:
            process.suspend()
    said = (tmp_path / "one.log").read_text()
    assert one.processes["serve"].returncode == 128 + signal.SIGTERM
    assert "the schedules are not paused" in said and "Traceback" not in said, said
    assert server and not any(process.is_running() for process in server)


# what a callback of the event loop does after the signal came, a task may wait for
IN_A_CALLBACK = """
import asyncio, os, signal
from flows import deployed, serve

async def start(runner):
    loop = asyncio.get_running_loop()
    answer = loop.create_future()

    def callback():
        os.kill(os.getpid(), signal.SIGTERM)
        answer.set_result("paused")

    loop.call_soon(callback)
    try:
        await asyncio.sleep(600)
    finally:
        print(await answer)

deployed.Served.start = start
signal.signal(signal.SIGTERM, serve.end)
deployed.serve([])
"""


def test_sigterm_in_the_middle_of_a_callback_loses_nothing():
    words = {**command(0), "args": [sys.executable, "-c", IN_A_CALLBACK]}
    done = subprocess.run(**words, cwd=ROOT, capture_output=True, text=True, timeout=HUNG)
    assert (done.returncode, done.stdout) == (128 + signal.SIGTERM, "paused\n"), done.stderr


@pytest.mark.slow
def test_two_checkouts_share_no_deployment_and_one_ends_without_the_other(served, tmp_path):
    ids = lambda one: {each["id"] for each in one.post("/deployments/filter")}
    with serving(tmp_path / "two") as other:
        assert (
            len(ids(served)) == len(ids(other)) == 4
            and not ids(served) & ids(other)
            and served.key != other.key
        )
    assert not any(each["paused"] for each in served.post("/deployments/filter"))


def test_a_taken_port_is_said_and_no_strangers_server_is_used(tmp_path):
    class Stranger(Handler):
        def do_GET(self):
            self.say((200, {}, b"true"))

    with loopback(Stranger) as url:
        port = int(url.rpartition(":")[2])
        told = refused_start(port, tmp_path)
        assert f"error: port {port} is taken" in told and "PREFECT_API_URL" not in told
        ours = subprocess.Popen(["sleep", "60"])  # a server that has not got its port yet
        try:
            with pytest.raises(UserError, match="no Prefect server answers"):
                wait_until_healthy(f"{url}/api", ours, limit=2)
        finally:
            ours.kill()
            ours.wait()
