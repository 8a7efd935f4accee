"""A page in headless Chromium over its DevTools protocol: what it logs, what it asks the network for, what a script finds."""

import contextlib
import json
import shutil
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from websockets.sync.client import connect

FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--remote-debugging-port=0",
]


class Page:
    """One loaded page; `events` holds what Chromium reported since the page was opened."""

    def __init__(self, socket):
        self._socket, self._number, self.events = socket, 0, []

    def call(self, method: str, **parameters) -> dict:
        """The result of a DevTools command."""
        self._number += 1
        self._socket.send(json.dumps({"id": self._number, "method": method, "params": parameters}))
        while True:
            message = json.loads(self._socket.recv(timeout=30))
            if message.get("id") == self._number:
                assert "error" not in message, message
                return message["result"]
            self.events.append(message)

    def evaluate(self, script: str):
        """The value of a JavaScript expression, awaited if it is a promise."""
        done = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in done, done
        return done["result"].get("value")

    def requests(self) -> list[str]:
        """Addresses that the page asked for, data: ones left out."""
        sent = [event["params"]["request"]["url"] for event in self.events if event["method"] == "Network.requestWillBeSent"]
        return [url for url in sent if not url.startswith("data:")]

    def complaints(self) -> list[dict]:
        """Exceptions, and console and browser messages of level error or warning."""
        kinds = {"Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded"}
        return [event for event in self.events if event["method"] in kinds]


@contextlib.contextmanager
def open_page(address: str, folder: Path, width: int = 1200, height: int = 900) -> Iterator[Page]:
    """Loads an address; skips the test, saying so, on a machine without Chromium. folder: for its profile."""
    binary = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if binary is None:
        pytest.skip("no Chromium on this machine: the page was not looked at")
    process = subprocess.Popen(
        [binary, *FLAGS, f"--user-data-dir={folder}", f"--window-size={width},{height}", "about:blank"], stderr=subprocess.DEVNULL
    )
    try:
        port_file, deadline = folder / "DevToolsActivePort", time.monotonic() + 60
        while not (port_file.exists() and port_file.read_text().strip()):
            assert process.poll() is None and time.monotonic() < deadline, "Chromium did not start"
            time.sleep(0.1)
        port = port_file.read_text().split()[0]
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/json/list") as answer:
            target = next(one for one in json.load(answer) if one["type"] == "page")
        with connect(target["webSocketDebuggerUrl"], max_size=None) as socket:
            page = Page(socket)
            for domain in ("Page", "Runtime", "Log", "Network"):
                page.call(f"{domain}.enable")
            page.call("Page.navigate", url=address)
            page.evaluate("new Promise(done => document.readyState === 'complete' ? done() : addEventListener('load', done))")
            while page.evaluate("location.href") == "about:blank" or page.evaluate("document.readyState") != "complete":
                time.sleep(0.05)
            yield page
    finally:
        process.terminate()
        process.wait(timeout=20)
