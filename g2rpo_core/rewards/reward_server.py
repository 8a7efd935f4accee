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
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from threading import Lock

import torch
from fastapi import FastAPI, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import JSONResponse
from PIL import Image
from pydantic import ValidationError
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import ClientDisconnect

from g2rpo_core.foundation.errors import UserError
from g2rpo_core.foundation.texts import echo
from g2rpo_core.rewards.limits import MOST_LETTERS, has_few_values
from g2rpo_core.rewards.preprocess import opaque
from g2rpo_core.rewards.reward_protocol import (
    MOST_IMAGES,
    NPY,
    PNG,
    Health,
    Scored,
    ScoreRequest,
    answer,
    decode,
)
from g2rpo_core.rewards.scoring import score_one
from g2rpo_core.rewards.spec import Reward

AT_ONCE = 8  # requests that are decoded and scored at once, and fit into memory at their largest
# Of a body: what a pixel of 8-bit RGB takes in base64. So one limit holds bytes and pixels: few
# bytes of a PNG become no more memory than a body that may be sent
BYTES_PER_PIXEL = 4
MOST_VALUES = 4 * MOST_IMAGES  # in a request's JSON; one of MOST_IMAGES has 515
ARRIVES = 60.0  # seconds that a request may take to arrive


class Refused(Exception):
    """A request that gets no scores, with its HTTP status."""

    def __init__(self, status: int, reason: str):
        super().__init__(reason)
        self.status = status


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


class Room:
    """Bytes that are left for the bodies of all requests together."""

    def __init__(self, left: int):
        self.left = left


def make_app(served: Served) -> FastAPI:
    """Make the server's application. The reward is never called by two threads at once."""
    app = FastAPI(title=f"g2rpo: {served.health.label}", openapi_url=None)
    app.add_middleware(TrustedHostMiddleware, allowed_hosts=served.names, www_redirect=False)
    turn, places, room = Lock(), asyncio.Semaphore(AT_ONCE), Room(AT_ONCE * served.most_bytes)

    @app.get("/health")
    async def health(request: Request) -> Health:
        check_key(request, served.key)
        return served.health

    @app.post("/score")
    async def score(request: Request) -> JSONResponse:
        check_key(request, served.key)
        # A page of another site can send anything but this type without asking
        if (
            request.headers.get("content-type", "").partition(";")[0].strip().lower()
            != "application/json"
        ):
            raise Refused(415, "the request must be of Content-Type: application/json")
        # What arrives slowly keeps nobody else waiting
        async with whole_body(request, served.most_bytes, room) as data, places:
            return JSONResponse(await run_in_threadpool(score_request, served, data, turn))

    @app.exception_handler(Refused)
    async def refused(request: Request, error: Refused) -> JSONResponse:
        return JSONResponse({"detail": str(error)}, error.status)

    @app.exception_handler(Exception)
    async def failed(request: Request, error: Exception) -> JSONResponse:
        # The server's log has more
        return JSONResponse({"detail": f"the server failed: {type(error).__name__}"}, 500)

    return app


def check_key(request: Request, key: str | None) -> None:
    sent = request.headers.get("authorization", "")
    if key is not None and not hmac.compare_digest(sent.encode(), f"Bearer {key}".encode()):
        raise Refused(401, "a key is needed: Authorization: Bearer KEY")


@asynccontextmanager
async def whole_body(request: Request, most: int, room: Room) -> AsyncIterator[bytearray]:
    """Read a request's body, at most `most` bytes, and hold its room until the block ends."""
    length = request.headers.get("content-length", "0")
    data = bytearray()
    try:
        async with asyncio.timeout(ARRIVES):
            if length.isdigit() and int(length) > most:
                raise too_large(most)
            async for part in request.stream():
                if len(data) + len(part) > most:
                    raise too_large(most)
                if len(part) > room.left:
                    raise Refused(503, "too many large requests at once: ask again")
                room.left -= len(part)
                data += part
        yield data
    except TimeoutError:
        raise Refused(408, f"the request took over {ARRIVES:g} s to arrive") from None
    except ClientDisconnect:
        raise Refused(400, "the request was cut off") from None
    finally:
        room.left += len(data)


def too_large(most: int) -> Refused:
    return Refused(
        413,
        f"the request is over {most / 2**20:g} MiB: send fewer images at once, "
        "or start the server with a higher limit",
    )


def refusal_of(error: ValidationError) -> Refused:
    """Return the refusal of a request by the first thing that is wrong with it."""
    problem = error.errors(include_url=False)[0]
    where = ": ".join(str(part)[:60] for part in problem["loc"])
    if problem["type"] == "too_long":
        count = problem["ctx"]["actual_length"]
        return Refused(413, f"{count} {where}; a request may have at most {MOST_IMAGES}")
    said = problem["msg"]
    if problem["type"] == "string_too_long":
        said = f"{len(problem['input'])} characters; a prompt may have at most {MOST_LETTERS}"
    return Refused(422, f"{where}: {said}" if where else said)


def score_request(served: Served, data: bytes | bytearray, turn: Lock) -> dict[str, list]:
    """Answer a request; Refused if it cannot be scored, or if the reward fails."""
    # Read the request
    if not has_few_values(data, MOST_VALUES):
        raise Refused(413, f"over {MOST_VALUES} values; a request may have {MOST_IMAGES} images")
    try:
        asked = ScoreRequest.model_validate_json(data)
    except ValidationError as error:
        raise refusal_of(error) from None
    prompts, urls = asked.prompts, asked.images
    if len(prompts) != len(urls):
        raise Refused(
            422, f"{len(urls)} images and {len(prompts)} prompts; need one prompt per image"
        )
    # Decode the images, no more pixels than fit into memory
    images: list[torch.Tensor | Image.Image] = []
    left = served.most_bytes // BYTES_PER_PIXEL
    for number, url in enumerate(urls):
        try:
            image, pixels = decode(url, left)
            check_image(served, image)
        except ValueError as error:
            # NumPy's reasons have several lines
            reason = " ".join(str(error).split())[:300]
            raise Refused(422, f"images: {number}: {reason}") from None
        images.append(image)
        left -= pixels
    # Score, one request at a time
    try:
        with turn:
            return answer(score_images(served, images, prompts))
    except UserError as error:
        reason = str(error)
    # A reward's code may raise anything; the next request may still be scored
    except Exception as error:  # noqa: BLE001
        lines = traceback.format_exc().splitlines()
        echo(f"{served.health.reward} failed:", *lines, file=sys.stderr)
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
    raise Refused(500, f"{served.health.reward} failed: {reason}")


def check_image(served: Served, image: torch.Tensor | Image.Image) -> None:
    """Check that the reward takes an image; ValueError otherwise."""
    size = image.size if isinstance(image, Image.Image) else (image.shape[2], image.shape[1])
    if problem := served.problem_of_image(*size):
        raise ValueError(problem)


def score_images(
    served: Served, images: Sequence[torch.Tensor | Image.Image], prompts: Sequence[str]
) -> list[Scored]:
    """Return scores in the images' order.

    Files are scored together, and so are tensors of one size, as the reward would get them locally.
    """
    from torchvision.transforms.v2 import functional as TF

    if served.tensors:
        to_tensor = lambda image: TF.to_dtype(
            TF.pil_to_tensor(opaque(image).convert("RGB")), torch.float32, scale=True
        )
        images = [
            image if isinstance(image, torch.Tensor) else to_tensor(image) for image in images
        ]
    alike = defaultdict(list)
    for number, image in enumerate(images):
        alike[image.shape if isinstance(image, torch.Tensor) else None].append(number)
    scored: dict[int, Scored] = {}
    for shape, numbers in alike.items():
        part = [images[number] for number in numbers]
        if shape is not None:
            part = torch.stack(part).to(served.device)  # type: ignore[arg-type, assignment]
        values, reasons = score_one(served.reward, part, [prompts[number] for number in numbers])
        scored |= dict(zip(numbers, zip(values.tolist(), reasons)))
    return [scored[number] for number in range(len(images))]


def describe(name: str, label: str, settings: dict, models: dict, note: str | None) -> Health:
    """Describe the server; its version is the release and a hash of settings and model files.

    These decide scores.
    """
    decides = json.dumps({"settings": settings, "models": models}, sort_keys=True).encode()
    try:
        release = importlib.metadata.version("g2rpo")
    except importlib.metadata.PackageNotFoundError:  # a checkout that is not installed
        release = "0"
    version = f"{release}+{hashlib.sha256(decides).hexdigest()[:12]}"
    return Health(
        reward=name,
        label=label,
        version=version,
        images=[PNG, NPY],
        max_images=MOST_IMAGES,
        note=note,
    )
