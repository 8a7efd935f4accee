"""The Prefect server of the flows: starts one on this machine, and waits for one that is away."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager

from g2rpo_core.foundation.errors import UserError

RESTARTS = 3
START_LIMIT = 120.0  # seconds; 9 to 25 with SQLite on two cores


def healthy(api: str) -> bool:
    """Tell whether a server answers at `api` (http://host:port/api) within five seconds."""
    try:
        with urllib.request.urlopen(f"{api}/health", timeout=5) as answer:
            return answer.status == 200
    except (urllib.error.URLError, OSError):
        return False


@contextmanager
def local_server(port: int) -> Iterator[str]:
    """Run a server on this machine with its SQLite file in PREFECT_HOME until the block ends; yield its API's address. UserError if the port is taken."""
    with socket.socket() as probe:
        if probe.connect_ex(("127.0.0.1", port)) == 0:
            raise UserError(
                f"port {port} is taken: give another --port, or use the server that runs there: PREFECT_API_URL=http://127.0.0.1:{port}/api"
            )
    api = f"http://127.0.0.1:{port}/api"
    supervised = Supervised(port)
    try:
        wait_until_healthy(api, supervised.process)
        supervised.watch()
        yield api
    finally:
        supervised.end()


class Supervised:
    """A server that is restarted when it ends by itself, RESTARTS times at most.

    Then SIGTERM ends this process, and `failed` says why. Runs in progress wait for it (`wait_for_server`).
    """

    def __init__(self, port: int):
        self.port, self.process, self.ending, self.restarts = port, start_server(port), threading.Event(), 0

    def watch(self) -> None:
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        while True:
            status = self.process.wait()
            if self.ending.is_set():
                return
            how = f"by signal {-status}" if status < 0 else f"with status {status}"
            if self.restarts == RESTARTS:
                failed.append(
                    f"the Prefect server ended {how} for the {RESTARTS + 1}th time; runs that were in progress resume from their checkpoints"
                )
                os.kill(os.getpid(), signal.SIGTERM)
                return
            self.restarts += 1
            print(f"the Prefect server ended {how}: restarting it ({self.restarts} of {RESTARTS})", file=sys.stderr, flush=True)
            # the rest of its group, which may still hold the port
            stop_server(self.process, signal.SIGKILL)
            self.process = start_server(self.port)

    def end(self) -> None:
        self.ending.set()
        stop_server(self.process)


failed: list[str] = []  # why this process ends


def start_server(port: int) -> subprocess.Popen:
    command = [sys.executable, "-m", "prefect", "server", "start", "--host", "127.0.0.1", "--port", str(port)]
    environment = {key: value for key, value in os.environ.items() if key != "PREFECT_API_URL"}
    environment |= {"PREFECT_UI_API_URL": f"http://127.0.0.1:{port}/api", "PREFECT_LOGGING_SERVER_LEVEL": "WARNING"}
    # Its own process group: Ctrl-C ends the flows first, while the server still accepts their last states
    return subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, start_new_session=True)


def stop_server(process: subprocess.Popen, number: signal.Signals = signal.SIGTERM) -> None:
    """End a server and all its processes."""
    try:
        os.killpg(process.pid, number)
        process.wait(15)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()


def wait_until_healthy(api: str, process: subprocess.Popen | None = None, limit: float = START_LIMIT) -> None:
    """Wait until the server answers; UserError if it does not within `limit` seconds, or if its process has ended."""
    until = time.monotonic() + limit
    while not healthy(api):
        if process is not None and process.poll() is not None:
            raise UserError(f"the Prefect server ended with status {process.returncode} at its start; see its output above")
        if time.monotonic() > until:
            raise UserError(f"no Prefect server answers at {api} within {limit:.0f} s")
        time.sleep(0.5)
