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
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
from fastapi import Depends, FastAPI, Header, HTTPException, Request
from fastapi.concurrency import run_in_threadpool
from PIL import Image
from starlette.middleware.trustedhost import TrustedHostMiddleware

from g2rpo_core.foundation.texts import echo, visible
from g2rpo_core.rewards.preprocess import check_pairs, in_eight_bits
from g2rpo_core.rewards.reward_protocol import (
    MOST_IMAGES,
    NPY,
    PNG,
    Health,
    Scored,
    ScoreRequest,
    Sent,
    answer,
    parse,
)
from g2rpo_core.rewards.scoring import score_one
from g2rpo_core.rewards.spec import Reward

# Of a body: what a pixel of 8-bit RGB takes in base64. So one limit holds bytes and pixels: few
# bytes of a PNG become no more memory than a body that may be sent
BYTES_PER_PIXEL = 4
# A page of another site can send any other type without asking
Json = Annotated[str, Header(pattern=r"(?i)^application/json *(;.*)?$")]


@dataclass(frozen=True)
class Served:
    """A reward that is served, and the limits of its requests."""

    reward: Reward
    health: Health
    device: torch.device
    """Where tensors are put."""
    most_bytes: int
    """The largest body of a request; its images have at most a pixel for BYTES_PER_PIXEL of it."""
    key: str | None = None
    """What clients must send; None: nothing."""
    names: Sequence[str] = ("*",)
    """The host names by which it may be asked; `*`: any."""


def make_app(served: Served) -> FastAPI:
    """Make the server's application. The reward is never called by two threads at once."""

    def check_key(authorization: Annotated[str, Header()] = "") -> None:
        wanted = f"Bearer {served.key}".encode()
        if served.key and not hmac.compare_digest(authorization.encode(), wanted):
            raise HTTPException(401, "a key is needed: Authorization: Bearer KEY")

    label = f"g2rpo: {served.health.label}"
    app = FastAPI(title=label, openapi_url=None, dependencies=[Depends(check_key)])
    app.add_middleware(TrustedHostMiddleware, allowed_hosts=served.names, www_redirect=False)
    turn = asyncio.Lock()

    @app.get("/health")
    async def health() -> Health:
        return served.health

    @app.post("/score")
    async def score(request: Request, content_type: Json) -> dict[str, list]:
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


def score_request(served: Served, data: bytearray) -> dict[str, list]:
    """Answer a request; HTTPException if it cannot be scored, or if the reward fails."""
    try:
        images, prompts = read_request(served, data)
    except Exception as error:  # noqa: BLE001 - PIL raises many
        raise HTTPException(422, visible(str(error)[:300])) from None
    try:
        return answer(score_images(served, images, prompts))
    # A reward's code may raise anything; the next request may still be scored
    except Exception as error:  # noqa: BLE001
        echo(*traceback.format_exc().splitlines(), file=sys.stderr)
        said = visible(f"{type(error).__name__}: {error}"[:300])
        raise HTTPException(500, f"{served.health.reward} failed: {said}") from None


def read_request(served: Served, data: bytearray) -> tuple[list[Sent], list[str]]:
    """Read the images and prompts of a request; an error says what does not fit."""
    asked = parse(ScoreRequest, data)
    sides = (
        image.size if isinstance(image, Image.Image) else image.shape[1:] for image in asked.images
    )
    if sum(width * height for width, height in sides) > served.most_bytes // BYTES_PER_PIXEL:
        raise ValueError("images: too many pixels: send fewer at once")
    images = [
        in_eight_bits(image.copy()) if isinstance(image, Image.Image) else image
        for image in asked.images
    ]
    check_pairs(images, asked.prompts)
    return images, asked.prompts


def score_images(served: Served, images: Sequence[Sent], prompts: Sequence[str]) -> list[Scored]:
    """Return scores in the images' order.

    Images of one kind are scored together, as the reward would get them locally: files, or tensors
    of one size. Others are scored one by one.
    """
    files = [image for image in images if isinstance(image, Image.Image)]
    tensors = [image for image in images if isinstance(image, torch.Tensor)]
    if (files and tensors) or len({tensor.shape for tensor in tensors}) > 1:
        return [score_images(served, [one], [text])[0] for one, text in zip(images, prompts)]
    batch = torch.stack(tensors).to(served.device) if tensors else files
    values, reasons = score_one(served.reward, batch, prompts)
    return list(zip(values.tolist(), reasons))


def describe(name: str, label: str, settings: dict, models: dict, note: str | None) -> Health:
    """Describe the server; its version is the release and a hash of settings and model files.

    These decide scores.
    """
    decides = json.dumps({"settings": settings, "models": models}, sort_keys=True).encode()
    release = importlib.metadata.version("g2rpo")
    return Health(
        reward=name,
        label=label,
        version=f"{release}+{hashlib.sha256(decides).hexdigest()[:12]}",
        images=[PNG, NPY],
        max_images=MOST_IMAGES,
        note=note,
    )
