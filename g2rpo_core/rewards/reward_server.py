"""Serve a reward over HTTP: GET /health and POST /score, as docs/reward_servers.md describes them.

Requests are scored one after the other. One that cannot be answered gets a status and a reason in
one line, never a made-up score.
"""

import asyncio
import hashlib
import hmac
import importlib.metadata
import json
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from fastapi import Depends, FastAPI, HTTPException, Request
from fastapi.concurrency import run_in_threadpool
from PIL import Image
from pydantic import ValidationError
from starlette.middleware.trustedhost import TrustedHostMiddleware

from g2rpo_core.foundation.errors import UserError
from g2rpo_core.foundation.texts import echo
from g2rpo_core.rewards.preprocess import opaque, transforms
from g2rpo_core.rewards.reward_protocol import (
    MOST_IMAGES,
    NPY,
    PNG,
    Health,
    Scored,
    ScoreRequest,
    Sent,
    answer,
    decode,
    first_problem,
)
from g2rpo_core.rewards.scoring import score_one
from g2rpo_core.rewards.spec import Reward

# Of a body: what a pixel of 8-bit RGB takes in base64. So one limit holds bytes and pixels: few
# bytes of a PNG become no more memory than a body that may be sent
BYTES_PER_PIXEL = 4


@dataclass(frozen=True)
class Served:
    """A reward that is served, and the limits of its requests."""

    reward: Reward
    health: Health
    device: torch.device
    """Where tensors are put."""
    tensors: bool
    """Whether the reward takes tensors only, no PIL images."""
    most_bytes: int
    """The largest body of a request; its images have at most a pixel for BYTES_PER_PIXEL of it."""
    key: str | None = None
    """What clients must send; None: nothing."""
    names: Sequence[str] = ("*",)
    """The host names by which it may be asked; `*`: any."""
    problem_of_image: Callable[[int, int], str | None] = lambda width, height: None
    """The reward's own limits, as in its `RewardSpec`."""


def make_app(served: Served) -> FastAPI:
    """Make the server's application. The reward is never called by two threads at once."""

    def check_key(request: Request) -> None:
        sent = request.headers.get("authorization", "")
        if served.key and not hmac.compare_digest(sent.encode(), f"Bearer {served.key}".encode()):
            raise HTTPException(401, "a key is needed: Authorization: Bearer KEY")

    label = f"g2rpo: {served.health.label}"
    app = FastAPI(title=label, openapi_url=None, dependencies=[Depends(check_key)])
    app.add_middleware(TrustedHostMiddleware, allowed_hosts=served.names, www_redirect=False)
    turn = asyncio.Lock()

    @app.get("/health")
    async def health() -> Health:
        return served.health

    @app.post("/score")
    async def score(request: Request) -> dict[str, list]:
        # A page of another site can send anything but this type without asking
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            raise HTTPException(415, "the request must be of Content-Type: application/json")
        data = bytearray()
        async for part in request.stream():
            data += part
            if len(data) > served.most_bytes:
                raise HTTPException(
                    413,
                    f"the request is over {served.most_bytes / 2**20:g} MiB: send fewer images at "
                    "once, or start the server with a higher limit",
                )
        async with turn:
            return await run_in_threadpool(score_request, served, data)

    return app


def score_request(served: Served, data: bytes | bytearray) -> dict[str, list]:
    """Answer a request; HTTPException if it cannot be scored, or if the reward fails."""
    try:
        asked = ScoreRequest.model_validate_json(data)
    except ValidationError as error:
        kind, said = first_problem(error)
        raise HTTPException(413 if kind == "too_long" else 422, said) from None
    prompts, images = asked.prompts, list[Sent]()
    if len(prompts) != len(asked.images):
        raise HTTPException(
            422, f"{len(asked.images)} images and {len(prompts)} prompts; need one prompt per image"
        )
    left = served.most_bytes // BYTES_PER_PIXEL
    for number, url in enumerate(asked.images):
        try:
            images.append(decode(url))
            width, height = size_of(images[-1])
            left -= width * height
            if problem := served.problem_of_image(width, height):
                raise ValueError(problem)
            if left < 0:
                raise ValueError("too many pixels in the images up to this one: send fewer at once")
        except ValueError as error:
            # NumPy's reasons have several lines
            reason = " ".join(str(error).split())[:300]
            raise HTTPException(422, f"images: {number}: {reason}") from None
    try:
        return answer(score_images(served, images, prompts))
    except UserError as error:
        reason = str(error)
    # A reward's code may raise anything; the next request may still be scored
    except Exception as error:  # noqa: BLE001
        lines = traceback.format_exc().splitlines()
        echo(f"{served.health.reward} failed:", *lines, file=sys.stderr)
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
    raise HTTPException(500, f"{served.health.reward} failed: {reason}")


def size_of(image: Sent) -> tuple[int, int]:
    """Return an image's width and height."""
    return image.size if isinstance(image, Image.Image) else (image.shape[2], image.shape[1])


def score_images(served: Served, images: Sequence[Sent], prompts: Sequence[str]) -> list[Scored]:
    """Return scores in the images' order.

    Files in a row are scored together, and so are tensors of one size, as the reward would get them
    locally.
    """
    if served.tensors:
        images = [image if isinstance(image, torch.Tensor) else _tensor(image) for image in images]
    shape_of = lambda pair: pair[0].shape if isinstance(pair[0], torch.Tensor) else None
    scored: list[Scored] = []
    for shape, pairs in groupby(zip(images, prompts), key=shape_of):
        part, texts = zip(*pairs)
        batch = part if shape is None else torch.stack(part).to(served.device)
        values, reasons = score_one(served.reward, batch, texts)
        scored += zip(values.tolist(), reasons)
    return scored


def _tensor(image: Image.Image) -> torch.Tensor:
    pixels = transforms().pil_to_tensor(opaque(image).convert("RGB"))
    return transforms().to_dtype(pixels, torch.float32, scale=True)


def describe(name: str, label: str, settings: dict, models: dict, note: str | None) -> Health:
    """Describe the server; its version is the release and a hash of settings and model files.

    These decide scores.
    """
    decides = json.dumps({"settings": settings, "models": models}, sort_keys=True).encode()
    try:
        release = importlib.metadata.version("g2rpo")
    except importlib.metadata.PackageNotFoundError:  # a checkout that is not installed
        release = "0"
    return Health(
        reward=name,
        label=label,
        version=f"{release}+{hashlib.sha256(decides).hexdigest()[:12]}",
        images=[PNG, NPY],
        max_images=MOST_IMAGES,
        note=note,
    )
