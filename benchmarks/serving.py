"""Measure the reward server and the demo under load: answers a second, waiting times, refusals and memory.

    python -m benchmarks.serving --profile tiny [--clients 100] [--seconds 120] [reward] [demo]

Run it in a checkout that has the profile's models. Each server is a process of its own; the clients
are tasks of this one, and ask again as soon as they are answered. The demo draws for one client at
a time and lets 20 wait: it tells the others so, and they ask again after a second.
"""

import asyncio
import base64
import io
import json
import subprocess
import sys
import time
import uuid
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections import Counter
from collections.abc import Callable, Coroutine

import httpx
import numpy as np
import pandas as pd
import psutil
from PIL import Image

from benchmarks.load import sum_memory

Ask = Callable[[httpx.AsyncClient], Coroutine[None, None, str]]
COMMANDS = {"reward": ("serve-reward", "--reward", "hps"), "demo": ("demo",)}
IMAGES = 4  # of a request to the reward server


def start(*words: str) -> tuple[subprocess.Popen, str]:
    """Start a server of `g2rpo`; return its process and its address."""
    command = [sys.executable, "-m", "g2rpo_core.cli", *words]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert process.stdout
    for line in process.stdout:
        if address := next(
            (word for word in line.replace(";", " ").split() if word.startswith("http")), ""
        ):
            return process, address.rstrip("/")
    sys.exit(f"error: g2rpo {' '.join(words)} did not start: run it by hand")


def ask_reward(url: str) -> Ask:
    """Return a request for the scores of a few images of 64 x 64 pixels, different in every call."""
    generator = np.random.default_rng(0)

    async def ask(client: httpx.AsyncClient) -> str:
        images = []
        for _ in range(IMAGES):
            png = io.BytesIO()
            Image.fromarray(generator.integers(0, 256, (64, 64, 3), dtype=np.uint8)).save(
                png, "PNG"
            )
            images.append("data:image/png;base64," + base64.b64encode(png.getvalue()).decode())
        answer = await client.post(
            f"{url}/score", json={"prompts": ["a red circle"] * IMAGES, "images": images}
        )
        return "answered" if answer.is_success else f"status {answer.status_code}"

    return ask


def ask_demo(url: str) -> Ask:
    """Return a click on Draw with what the page shows at first, which waits for its images."""
    config = httpx.get(f"{url}/config").json()
    draw = next(event for event in config["dependencies"] if event["api_name"] == "draw")
    shown = {one["id"]: one["props"].get("value") for one in config["components"]}
    prompt = next(
        one["id"] for one in config["components"] if one["props"].get("label") == "Prompt"
    )
    data = [(shown | {prompt: "a red circle"})[name] for name in draw["inputs"]]

    async def ask(client: httpx.AsyncClient) -> str:
        session = uuid.uuid4().hex
        click = {
            "data": data,
            "fn_index": draw["id"],
            "session_hash": session,
            "trigger_id": draw["targets"][0][0],
        }
        joined = await client.post(f"{url}/gradio_api/queue/join", json=click)
        if not joined.is_success:
            await asyncio.sleep(1)
            return f"status {joined.status_code}"
        async with client.stream(
            "GET", f"{url}/gradio_api/queue/data", params={"session_hash": session}
        ) as events:
            async for line in events.aiter_lines():
                message = (
                    json.loads(line.removeprefix("data: ")) if line.startswith("data: ") else {}
                )
                if message.get("msg") == "process_completed":
                    return "answered" if message["success"] else "failed"
        return "cut off"

    return ask


async def press(ask: Ask, clients: int, seconds: float) -> pd.DataFrame:
    """Let so many clients ask for so long; return the end, the seconds and what came of every request."""
    asked = []

    async def client_of(client: httpx.AsyncClient) -> None:
        while True:
            sent = time.perf_counter()
            try:
                outcome = await ask(client)
            except httpx.HTTPError as error:
                outcome = type(error).__name__
            ended = time.perf_counter()
            asked.append({"end": ended - begin, "seconds": ended - sent, "outcome": outcome})
            if ended - begin > seconds:
                return

    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(trust_env=False, timeout=600, limits=limits) as client:
        begin = time.perf_counter()
        await asyncio.gather(*(client_of(client) for _ in range(clients)))
    return pd.DataFrame(asked)


def measure(name: str, profile: str, clients: int, seconds: float) -> dict:
    """Start a server, let one client ask, then many; return the figures."""
    process, url = start(*COMMANDS[name], "--profile", profile)
    try:
        ask = {"reward": ask_reward, "demo": ask_demo}[name](url)
        alone = asyncio.run(press(ask, 1, seconds / 10))
        before = sum_memory(psutil.Process(process.pid))
        many = asyncio.run(press(ask, clients, seconds))
        after = sum_memory(psutil.Process(process.pid))
    finally:
        process.terminate()
        process.wait()
    answered = many[many.outcome == "answered"]
    return {
        "server": name,
        "clients": clients,
        "alone_per_s": round((alone.outcome == "answered").sum() / alone.end.max(), 2),
        "per_s": round(len(answered) / many.end.max(), 2),
        "p50_s": round(answered.seconds.median(), 2),
        "p95_s": round(answered.seconds.quantile(0.95), 2),
        "outcomes": dict(Counter(many.outcome)),
        "mib_before": round(before / 2**20),
        "mib_after": round(after / 2**20),
    }


def main() -> None:
    """Parse the options, measure, and print one line for each server."""
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument(
        "what", nargs="*", default=list(COMMANDS), help="which to measure (default: both)"
    )
    parser.add_argument("--profile", default="tiny")
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=120.0, help="that the clients ask for")
    args = parser.parse_args()
    for name in args.what:
        print(json.dumps(measure(name, args.profile, args.clients, args.seconds)), flush=True)


if __name__ == "__main__":
    main()
