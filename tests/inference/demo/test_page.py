"""The page as it is used: `g2rpo demo` as a process, and Chromium, on loopback alone."""

import os
import socket
import threading
import time
from urllib.parse import parse_qs, urlsplit

import httpx
import pytest

from g2rpo_core.cli.main import main
from tests.conftest import ROOT
from tests.fixtures.browser import Page, open_page
from tests.fixtures.commands import refusal
from tests.fixtures.demo import demo_process
from tests.fixtures.projects import small_project
from tests.fixtures.waiting import HUNG, until

pytestmark = pytest.mark.pipeline
PROMPT = "a large red circle above a small blue square"


class Trap:
    """A proxy that answers nobody: `caught` has what any process wanted of the task outside."""

    def __init__(self):
        self.caught: list[bytes] = []
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.address = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        while True:
            with self._socket.accept()[0] as one:
                self.caught.append(one.recv(200))


@pytest.fixture(scope="module")
def trap():
    return Trap()


@pytest.fixture(scope="module")
def project(models, tmp_path_factory):
    return small_project(tmp_path_factory.mktemp("page"), models)


@pytest.fixture(scope="module")
def address(project, trap):
    """The demo of a project with a run of whole weights and one of a LoRA."""
    (project / "reports").symlink_to(ROOT / "reports")
    proxies = dict.fromkeys(
        ("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"), trap.address
    )
    environment = {
        **os.environ,
        **proxies,
        "NO_PROXY": "127.0.0.1",
        "no_proxy": "127.0.0.1",
        "HF_HUB_OFFLINE": "0",
    }
    for name in (
        "CI",
        "ORT_DISABLE_TELEMETRY",
    ):  # where either is set, onnxruntime is silent by itself
        environment.pop(name, None)
    (project / "uploads").mkdir()
    environment["GRADIO_TEMP_DIR"] = str(project / "uploads")
    with demo_process(project, environment) as (url, _, log):
        yield f"{url}/"
        assert "Traceback" not in log.read_text() and "Anybody" not in log.read_text()
    assert list((project / "uploads").iterdir()) == []


def test_it_takes_no_files_and_no_page_of_another_name(address):
    """A page of another name at this address (DNS rebinding) would read and press everything."""
    client = httpx.Client(base_url=address, trust_env=False, timeout=HUNG)
    upload = client.post("gradio_api/upload", files={"files": ("a.txt", b"ab")})
    assert upload.status_code == 413
    for path in ("", "config", "gradio_api/info"):
        assert client.get(path, headers={"Host": "evil.example"}).status_code == 400, path
    assert client.get("", headers={"Host": "localhost"}).status_code == 200


def text_of(page: Page, place: str) -> str:
    return page.evaluate(f"document.querySelector('#{place}')?.innerText ?? ''")


def write(page: Page, text: str) -> None:
    until(lambda: page.evaluate("Boolean(document.querySelector('#prompt textarea'))"))
    page.evaluate("document.querySelector('#prompt textarea').focus()")
    page.evaluate("document.querySelector('#prompt textarea').select()")
    page.call("Input.insertText", text=text)


def press(page: Page, label: str) -> None:
    found = (
        f"[...document.querySelectorAll('label')].find(one => one.innerText.trim() === {label!r})"
    )
    wanted = f"({found} ?? document.querySelector({'#' + label!r}))"
    until(lambda: page.evaluate(f"Boolean({wanted})"))
    page.evaluate(f"{wanted}.click()")


def shown(page: Page) -> list[str]:
    """The sources of the pictures."""
    return page.evaluate("[...document.querySelectorAll('#pictures img')].map(one => one.src)")


def test_a_prompt_gives_pictures_with_scores_and_a_link_brings_them_back(address, trap, tmp_path):
    with open_page(address, tmp_path / "chromium") as page:
        # The page begins with an example, by the base and the first run, and with folded controls
        assert len(until(lambda: shown(page))) == 2 and "one prompt with one noise" in text_of(
            page, "pictures"
        )
        assert page.evaluate("document.querySelector('#steps')?.offsetParent ?? null") is None
        write(page, PROMPT)
        press(page, "g2rpo-2")
        press(page, "PickScore")
        press(page, "draw")
        first = until(lambda: len(shown(page)) == 3 and shown(page))
        assert len(set(first)) == 3
        words = text_of(page, "pictures")
        assert all(
            name in words
            for name in ("base", "g2rpo-1", "g2rpo-2", "HPS-v2.1", "CLIP Score", "PickScore")
        )
        assert "tiny models, not HPS-v2.1" in words
        until(lambda: "seed=0" in page.evaluate("location.href"))
        query = parse_qs(urlsplit(page.evaluate("location.href")).query)
        assert query["prompt"] == [PROMPT] and query["runs"] == ["g2rpo-1", "g2rpo-2"]
        until(lambda: page.evaluate("document.querySelector('#history a') !== null"))
        time.sleep(
            1
        )  # Gradio tells the console of a request that it has to give up as one leaves the page
        page.evaluate("document.querySelector('#history a').click()")
        until(lambda: page.evaluate("document.readyState") == "complete" and len(shown(page)) == 3)
        assert shown(page) == first
        assert page.evaluate("document.querySelector('#prompt textarea').value") == PROMPT
        until(
            lambda: text_of(page, "history").count(PROMPT) == 1
        )  # the browser kept it, and it was drawn again
        page.evaluate(
            "[...document.querySelectorAll('button[role=tab]')].find(one => "
            "one.innerText.includes('all methods')).click()"
        )
        until(lambda: page.evaluate("document.querySelectorAll('#pairs img').length") > 30)
        assert page.complaints() == []
        assert [url for url in page.requests() if not url.startswith(address)] == []
    assert trap.caught == []


def test_a_mistake_is_one_sentence_on_the_page_and_a_prompt_is_no_html(address, tmp_path):
    with open_page(f"{address}?prompt=x&steps=1000", tmp_path / "chromium") as page:
        until(
            lambda: (
                "the link does not fit: steps: Input should be less than or equal to 100"
                in text_of(page, "message")
            )
        )
        write(page, "a circle " * 20)
        press(page, "draw")
        until(lambda: "over the profile's embed.max_sequence_length" in text_of(page, "message"))
        assert "Traceback" not in page.evaluate(
            "document.body.innerText"
        ) and "a circle" not in text_of(page, "pictures")
        write(
            page, "<img src=x onerror=\"document.title='broken'\">${1+1}"
        )  # too long as well: it stands in the message
        press(page, "draw")
        until(lambda: "<img src=x" in text_of(page, "message"))
        assert "${1+1}" in text_of(page, "message")
        write(page, "<b>a</b>")  # short enough to be drawn
        press(page, "draw")
        until(lambda: "<b>a</b>" in text_of(page, "pictures"))
        assert len(shown(page)) == 2 and "<b>a</b>" in text_of(page, "history")
        assert (
            page.evaluate("document.title") != "broken"
            and page.evaluate("document.querySelectorAll('img[src=x]').length") == 0
        )
        assert page.complaints() == []


def test_a_port_that_is_taken_and_a_run_that_is_not_there_end_in_one_line(address, project):
    port = address.rstrip("/").rsplit(":")[-1]
    taken = refusal(main, "demo", "--port", port, folder=project)
    assert f"error: demo: port {port} of 127.0.0.1 is not available" in taken
    unknown = refusal(main, "demo", "--run", "nowhere", folder=project)
    known = "base, g2rpo-1, g2rpo-2"
    assert unknown == f"error: nowhere: no trained weights; profile tiny has {known}\n"
