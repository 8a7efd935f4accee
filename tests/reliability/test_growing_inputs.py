"""Inputs that grow, at real servers on loopback: memory stays bounded, and others are answered.

Each kind of input is sent in sizes that grow by a factor, below and above what is allowed. While
one is under way another client asks, and at the end the server's peak of memory is compared with
the body that it allows. A small draw runs at every commit, the long one is `slow`.
"""

import base64
import io
import json
import os
import struct
import subprocess
import threading
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from tests.conftest import ROOT
from tests.fixtures.demo import demo_process
from tests.fixtures.projects import small_project
from tests.fixtures.score_server import serving
from tests.fixtures.waiting import HUNG

pytestmark = pytest.mark.pipeline
MIB = 2**20
JSON = {"Content-Type": "application/json"}
WITH_KEY = {**JSON, "Authorization": "Bearer s3cret-of-ours"}


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(width: int, height: int, *others: bytes) -> str:
    """A grey PNG as a data URL; its pixels are written in pieces, since they may be many."""
    packed, row = zlib.compressobj(9), bytes(1 + -(-width // 8))
    pixels = b"".join(packed.compress(row * min(64, height - top)) for top in range(0, height, 64))
    head = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    data = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + b"".join(others)
    data += chunk(b"IDAT", pixels + packed.flush()) + chunk(b"IEND", b"")
    return "data:image/png;base64," + base64.b64encode(data).decode()


def npy(shape: str, values: int) -> str:
    head = f"{{'descr': '<f4', 'fortran_order': False, 'shape': {shape}, }}".encode()
    file = io.BytesIO(b"\x93NUMPY\x01\x00" + struct.pack("<H", len(head)) + head + bytes(values))
    return "data:application/x-npy;base64," + base64.b64encode(file.getvalue()).decode()


def asked(images: list, prompts: list) -> bytes:
    return json.dumps({"images": images, "prompts": prompts}).encode()


def listed(item: str, size: int) -> bytes:
    return b'{"images":[' + b",".join([item.encode()] * (size // (len(item) + 1))) + b"]}"


PIXEL = png(1, 1)
# What grows -> the body of about a size in bytes, or of a picture of that many pixels
BODIES: dict[str, Callable[[int], bytes]] = {
    "numbers": lambda size: listed("1", size),
    "texts": lambda size: listed('""', size),
    "lists": lambda size: listed("[]", size),
    "objects": lambda size: listed("{}", size),
    "escapes": lambda size: listed(r'"\"\\"', size),
    "urls": lambda size: asked([PIXEL] * (size // 100), ["a"] * (size // 100)),
    "keys": lambda size: json.dumps({str(n): n for n in range(size // 12)}).encode(),
    "a key": lambda size: json.dumps({"a" * size: 1}).encode(),
    "twice": lambda size: b'{"images":[],' * (size // 13) + b'"prompts":[]}',
    "depth": lambda size: b"[" * size,
    "pairs of depth": lambda size: b'{"a":' * (size // 5),
    "digits": lambda size: b'{"images":' + b"1" * size + b"}",
    "spaces": lambda size: b" " * size + asked([PIXEL], ["a"]),
    "a prompt": lambda size: asked([PIXEL], ["a" * size]),
    "words": lambda size: asked([PIXEL], ["\u00e9 " * (size // 7)]),
    "prompts": lambda size: asked([PIXEL] * 256, ["a" * (size // 256)] * 256),
    "backslashes": lambda size: asked([PIXEL], ["\\" * (size // 4)]),
    "no base64": lambda size: asked(["data:image/png;base64," + "=" * size], ["a"]),
    "no png": lambda size: asked(["data:image/png;base64," + "A" * (size & ~3)], ["a"]),
    "bytes": lambda size: os.urandom(min(size, MIB)) * -(-size // MIB),
    "a wide picture": lambda size: asked([png(size, 1)], ["a"]),
    "a high picture": lambda size: asked([png(1, size)], ["a"]),
    "a large picture": lambda size: asked([png(*[int(size**0.5) * 4] * 2)], ["a"]),
    "large pictures": lambda size: asked([png(*[int(size**0.5)] * 2)] * 16, ["a"] * 16),
    "chunks": lambda size: asked([png(1, 1, chunk(b"prIv", b"") * (size // 16))], ["a"]),
    "texts of a png": lambda size: asked(
        [png(1, 1, *[chunk(b"zTXt", b"a\0\0" + zlib.compress(bytes(9 * size)))] * 9)], ["a"]
    ),
    "an array": lambda size: asked([npy(f"(3, 1, {size // 16})", size // 16 * 12)], ["a"]),
    "an array that lies": lambda size: asked([npy(f"(3, {size}, {size})", 12)], ["a"]),
    "an array's head": lambda size: asked([npy("(" * min(size, 60_000), 12)], ["a"]),
}


def peak(process: subprocess.Popen) -> int:
    """The largest memory that a process ever had, in bytes."""
    status = Path("/proc", str(process.pid), "status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024


def ask_beside(url: str, ask: Callable[[], httpx.Response], other: str) -> httpx.Response:
    """The answer to `ask`, while another client asks for `other` and is answered."""
    answers: list[httpx.Response] = []
    asking = threading.Thread(target=lambda: answers.append(ask()))
    asking.start()
    assert httpx.get(f"{url}{other}", trust_env=False, timeout=60).status_code in (200, 401)
    asking.join(HUNG)
    return answers[0]


@pytest.mark.parametrize(
    "mib, sizes",
    [
        (1, [2**12, MIB - 2**12, 2 * MIB]),
        pytest.param(32, [2**k for k in range(10, 27, 4)], marks=pytest.mark.slow),
    ],
)
def test_a_reward_server_holds_its_memory_whatever_it_is_asked(models, tmp_path, mib, sizes):
    """29 kinds in 3 sizes are 87 bodies, in 5 sizes 145."""
    words = ["--reward", "pickscore", "--models", models, "--max-request-mib", mib]
    words += ["--key-variable", "REWARD_KEY"]
    with serving(*words, folder=tmp_path, REWARD_KEY="s3cret-of-ours") as server:
        post = lambda body, headers=WITH_KEY: httpx.post(
            f"{server.url}/score", content=body, headers=headers, trust_env=False, timeout=HUNG
        )
        # Without the key no body is read
        before = peak(server.process)
        for kind in ("numbers", "lists", "texts"):
            body = BODIES[kind](32 * MIB)
            refused = ask_beside(server.url, lambda body=body: post(body, JSON), "/health")
            assert refused.status_code == 401
        assert peak(server.process) - before < 16 * MIB
        assert post(asked([PIXEL] * 256, ["a"] * 256)).status_code == 200
        before = peak(server.process)
        for kind, make in BODIES.items():
            for size in sizes:
                body = make(size)
                answer = ask_beside(server.url, lambda body=body: post(body), "/health")
                said = answer.json().get("detail", "")
                assert answer.status_code in (200, 413, 422), (kind, size, answer)
                assert "\n" not in said and len(said) < 400, (kind, size, said[:400])
                grown = peak(server.process) - before
                # A body is copied some times, and its pixels take 12 bytes for 4 of it
                assert grown < 12 * mib * MIB + 96 * MIB, (kind, size, grown // MIB)
        assert post(asked([PIXEL], ["a"])).status_code == 200
        assert "Traceback" not in server.log.read_text()


@contextmanager
def demo(project: Path) -> Iterator[tuple[str, subprocess.Popen]]:
    """`g2rpo demo` as a process; its log must have no traceback but of what Gradio refuses."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with demo_process(project, environment) as (url, process, log):
        yield url, process
        said = log.read_text()
        assert said.count("Traceback") == said.count("gradio.exceptions.Error: "), said[-3000:]


LINK = "?prompt=a+red+circle&seed=1"
LONGEST_LINK = 65_000  # httpx sends no longer one, and the server reads none
# What grows in what a browser sends -> the history, the prompts to vote on, the runs, and the link
SENT: dict[str, Callable[[int], tuple]] = {
    "links": lambda size: ([LINK] * (size // 30), "a", ["base"], ""),
    "a link in the history": lambda size: ([LINK + "&x=" + "y" * size], "a", ["base"], ""),
    "numbers": lambda size: ([1] * (size // 2), "a", ["base"], ""),
    "lists": lambda size: ([[]] * (size // 4), "a", ["base"], ""),
    "a text": lambda size: ("x" * size, "a", ["base"], ""),
    "an object": lambda size: ({str(n): n for n in range(size // 12)}, "a", ["base"], ""),
    "a prompt": lambda size: ([], "a" * size, ["base"], ""),
    "lines": lambda size: ([], "a\n" * (size // 3), ["base"], ""),
    "runs": lambda size: ([], "a red circle", ["base"] * (size // 8), ""),
    "other runs": lambda size: ([], "a", [f"run-{n}" for n in range(size // 12)], ""),
    "runs of a link": lambda size: ([], "a", ["base"], LINK + "&runs=base" * (size // 10)),
    "rewards of a link": lambda size: ([], "a", ["base"], LINK + "&rewards=hps" * (size // 12)),
    "a link": lambda size: ([], "a", ["base"], LINK + "&x=" + "y" * size),
}


@pytest.mark.parametrize(
    "sizes",
    [
        [2**9, 2**19],
        pytest.param([2**k for k in range(8, 25, 4)], marks=pytest.mark.slow),
    ],
)
def test_a_demo_holds_its_memory_whatever_a_browser_sends(models, tmp_path, sizes):
    """13 kinds in 2 sizes, to two events each, are 52 requests; in 5 sizes 130."""
    project = small_project(tmp_path, models)
    with demo(project) as (url, process), httpx.Client(trust_env=False, timeout=HUNG) as client:
        config = client.get(f"{url}/config").json()
        name_of = {each["id"]: each["props"].get("elem_id") for each in config["components"]}
        kind_of = {each["id"]: each["type"] for each in config["components"]}
        restore, pair = (
            next(
                each["id"]
                for each in config["dependencies"]
                if [name_of[place] or kind_of[place] for place in each["inputs"]] == inputs
            )
            for inputs in (["browserstate"], ["state", "vote-prompts", "vote-runs"])
        )

        def press(event: int, data: list, link: str, session: str) -> httpx.Response:
            body = {"data": data, "fn_index": event, "session_hash": session}
            sent = client.post(f"{url}/gradio_api/queue/join{link}", json=body)
            if sent.status_code == 200:  # wait until it is done
                place = f"{url}/gradio_api/queue/data?session_hash={session}"
                with client.stream("GET", place) as events:
                    next(line for line in events.iter_lines() if "process_completed" in line)
            return sent

        press(restore, [[LINK]], "", "first")
        press(pair, [None, "a large red circle", ["base"]], "", "second")
        before = peak(process)
        for kind, make in SENT.items():
            for size in sizes:
                history, prompts, runs, link = make(size)
                link = link[:LONGEST_LINK]
                for event, data in ((restore, [history]), (pair, [None, prompts, runs])):
                    ask = lambda event=event, data=data, link=link, each=(kind, size): press(
                        event, data, link, f"{each}{event}"
                    )
                    answer = ask_beside(url, ask, "/config")
                    assert answer.status_code in (200, 400, 413), (kind, size, answer)
        # Each allowed request has 4 MiB and 10,000 values
        assert peak(process) - before < 16 * 4 * MIB + 64 * MIB, (peak(process) - before) // MIB
        assert not (project / "votes").exists()
