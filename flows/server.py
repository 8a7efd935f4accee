"""The flows' Prefect server: start one on this machine behind a key, or wait for one elsewhere."""

import fcntl
import os
import secrets
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from g2rpo_core.foundation.errors import UserError
from g2rpo_core.foundation.texts import echo

HOME = Path(".cache", "prefect")  # PREFECT_HOME unless the environment names another
ACCESS = "access.sh"  # in the home: what a shell of the same user needs to use the server
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
def claim_home() -> Iterator[Path]:
    """Hold the lock of Prefect's home in the block; UserError if another `flows.serve` has it.

    It holds the database, so two checkouts never share deployments. Without PREFECT_HOME it is in
    this checkout.
    """
    home = Path(os.environ.setdefault("PREFECT_HOME", str(HOME.absolute())))
    try:
        home.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = (home / "serve.lock").open("a")
    except OSError as error:
        raise UserError(
            f"{home}: cannot be written ({error.strerror}): set PREFECT_HOME to a folder of yours"
        ) from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(
                f"{home}: another `flows.serve` is using it: end that one, "
                "or set PREFECT_HOME to another folder"
            ) from None
        except OSError as error:
            raise UserError(
                f"{home}: cannot be locked ({error.strerror}): set PREFECT_HOME to a folder on "
                "another disk"
            ) from None
        yield home


@contextmanager
def local_server(port: int, home: Path) -> Iterator[str]:
    """Run a server on this machine until the block ends; yield its API's address.

    home: of its SQLite file and its key. UserError if the port is taken.
    """
    with socket.socket() as probe:
        if probe.connect_ex(("127.0.0.1", port)) == 0:
            raise UserError(
                f"port {port} is taken, perhaps by somebody else's program: give another --port; "
                "if it is your own server, which outlived `flows.serve`, "
                f"first read {home / ACCESS} into this shell"
            )
    api = f"http://127.0.0.1:{port}/api"
    make_key(api, home)
    supervised = Supervised(port)
    try:
        wait_until_healthy(api, supervised.process)
        supervised.watch()
        yield api
    finally:
        supervised.end()


def make_key(api: str, home: Path) -> None:
    """Set a new key for the server at `api` in this process, and write it to a private file.

    Child processes inherit it; only this user can read the file.
    """
    key = os.environ.setdefault(
        "PREFECT_SERVER_API_AUTH_STRING", f"g2rpo:{secrets.token_urlsafe(32)}"
    )
    os.environ["PREFECT_API_AUTH_STRING"] = key
    access = {
        "PREFECT_HOME": home.absolute(),
        "PREFECT_API_URL": api,
        "PREFECT_API_AUTH_STRING": key,
    }
    file = home / ACCESS
    file.unlink(missing_ok=True)
    with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as lines:
        lines.writelines(
            f"export {name}={shlex.quote(str(value))}\n" for name, value in access.items()
        )


class Supervised:
    """A server that is restarted when it ends by itself, RESTARTS times at most.

    Then SIGTERM ends this process, and `failed` says why. Runs in progress wait for it
    (`wait_for_server`).
    """

    def __init__(self, port: int):
        self.port, self.process, self.ending, self.restarts = port, start_server(port), False, 0
        self.starting = threading.Lock()

    def watch(self) -> None:
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        while True:
            status = self.process.wait()
            if self.ending:
                return
            how = f"by signal {-status}" if status < 0 else f"with status {status}"
            if self.restarts == RESTARTS:
                failed.append(
                    f"the Prefect server ended {how} for the {RESTARTS + 1}th time; "
                    "runs that were in progress resume from their checkpoints"
                )
                os.kill(os.getpid(), signal.SIGTERM)
                return
            self.restarts += 1
            echo(
                f"the Prefect server ended {how}: restarting it ({self.restarts} of {RESTARTS})",
                file=sys.stderr,
            )
            # the rest of its group, which may still hold the port
            stop_server(self.process, signal.SIGKILL)
            with self.starting:
                if self.ending:
                    return
                self.process = start_server(self.port)

    def end(self) -> None:
        with self.starting:
            self.ending = True
        stop_server(self.process)


failed: list[str] = []  # why this process ends


def start_server(port: int) -> subprocess.Popen:
    """Start a server on loopback that only pages of its own address may ask.

    It needs a key if PREFECT_SERVER_API_AUTH_STRING is set.
    """
    command = [
        sys.executable,
        "-m",
        "prefect",
        "server",
        "start",
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
    ]
    environment = {key: value for key, value in os.environ.items() if key != "PREFECT_API_URL"}
    environment |= {
        "PREFECT_UI_API_URL": f"http://127.0.0.1:{port}/api",
        "PREFECT_SERVER_CORS_ALLOWED_ORIGINS": f"http://127.0.0.1:{port},http://localhost:{port}",
        "PREFECT_SERVER_CSRF_PROTECTION_ENABLED": "true",
        "PREFECT_LOGGING_SERVER_LEVEL": "WARNING",
    }
    # Its own process group: Ctrl-C ends the flows first, while the server still accepts their last
    # states
    return subprocess.Popen(
        command,
        env=environment,
        stdout=subprocess.DEVNULL,
        start_new_session=True,
        umask=0o077,  # its database is nobody else's, wherever its home is
    )


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


def wait_until_healthy(
    api: str, process: subprocess.Popen | None = None, limit: float = START_LIMIT
) -> None:
    """Wait until the server answers; UserError after `limit` seconds or if its process ends.

    process: the server's own, which must be what listens at `api`, not a stranger's program.
    """
    until = time.monotonic() + limit
    while not healthy(api) or (process is not None and not _listens(process, api)):
        if process is not None and process.poll() is not None:
            raise UserError(
                f"the Prefect server ended with status {process.returncode} at its start; "
                "see its output above"
            )
        if time.monotonic() > until:
            raise UserError(f"no Prefect server answers at {api} within {limit:.0f} s")
        time.sleep(0.5)


def _listens(process: subprocess.Popen, api: str) -> bool:
    """Tell whether a process or one of its children listens on the port of `api`."""
    port = urllib.parse.urlsplit(api).port
    try:
        family = [leader := psutil.Process(process.pid), *leader.children(recursive=True)]
        return any(
            one.laddr.port == port and one.status == "LISTEN"
            for each in family
            for one in each.net_connections("tcp")
        )
    except psutil.Error:  # it is ending
        return False
