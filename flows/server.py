"""The Prefect server as the flows see it: one on this machine, and waiting for one that is away."""

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager

from g2rpo_core.errors import UserError

START_LIMIT = 120.0  # seconds; 9 to 25 with SQLite on two cores


def healthy(api: str) -> bool:
    """Whether a server answers at `api` (http://host:port/api)."""
    try:
        with urllib.request.urlopen(f"{api}/health", timeout=5) as answer:
            return answer.status == 200
    except (urllib.error.URLError, OSError):
        return False


@contextmanager
def local_server(port: int) -> Iterator[str]:
    """A server on this machine with its SQLite file in PREFECT_HOME; gives its API's address and ends with the block."""
    with socket.socket() as probe:
        if probe.connect_ex(("127.0.0.1", port)) == 0:
            raise UserError(
                f"port {port} is taken: give another by --port, or name a server that runs there: PREFECT_API_URL=http://127.0.0.1:{port}/api"
            )
    api = f"http://127.0.0.1:{port}/api"
    process = start_server(port)
    try:
        wait_until_healthy(api, process)
        yield api
    finally:
        stop_server(process)


def start_server(port: int) -> subprocess.Popen:
    command = [sys.executable, "-m", "prefect", "server", "start", "--host", "127.0.0.1", "--port", str(port)]
    environment = {key: value for key, value in os.environ.items() if key != "PREFECT_API_URL"}
    environment |= {"PREFECT_UI_API_URL": f"http://127.0.0.1:{port}/api", "PREFECT_LOGGING_SERVER_LEVEL": "WARNING"}
    # a group of its own: Ctrl-C ends the flows first, while the server still takes their last states
    return subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, start_new_session=True)


def stop_server(process: subprocess.Popen, number: signal.Signals = signal.SIGTERM) -> None:
    """Ends a server and all its processes."""
    try:
        os.killpg(process.pid, number)
        process.wait(15)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()


def wait_until_healthy(api: str, process: subprocess.Popen | None = None, limit: float = START_LIMIT) -> None:
    """UserError if no server answers within `limit` seconds, or if its process has ended."""
    until = time.monotonic() + limit
    while not healthy(api):
        if process is not None and process.poll() is not None:
            raise UserError(f"the Prefect server ended with status {process.returncode} at its start; its own words are above")
        if time.monotonic() > until:
            raise UserError(f"no Prefect server answers at {api} within {limit:.0f} s")
        time.sleep(0.5)
