"""The messages between a client and a score server, as docs/reward_servers.md describes them."""

import base64
import binascii
import io
import json
import math
from collections.abc import Sequence
from tokenize import TokenError
from typing import Annotated, Literal

import numpy as np
import torch
from PIL import Image
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, PositiveInt, ValidationError

from g2rpo_core.rewards.limits import (
    MOST_LETTERS,
    cut,
    has_few_chunks,
    has_few_values,
    problem_of_image,
)
from g2rpo_core.rewards.preprocess import Images, in_eight_bits, opaque, pil_images

PNG, NPY = "image/png", "application/x-npy"
PNG_MODES = {"1", "L", "LA", "P", "RGB", "RGBA", "I;16"}
FLOAT32 = np.dtype("<f4")
LARGEST = torch.finfo(torch.float32).max  # scores are kept as float32
Sent = tuple[torch.Tensor | Image.Image, int]  # an image, [3, H, W] float32 or PIL, and its pixels
Scored = tuple[float, str | None]  # a score, or NaN and the reason why there is none
MOST_IMAGES = 256  # of a request
MOST_VALUES = 100_000  # in the JSON of an answer
# What is compared with settings, and what is only shown
Named = Annotated[str, Field(max_length=200)]
Shown = Annotated[str, AfterValidator(cut)]
Prompts = Annotated[
    list[Annotated[str, Field(max_length=MOST_LETTERS)]],
    Field(max_length=MOST_IMAGES, fail_fast=True),
]


class Health(BaseModel):
    """The answer to GET /health."""

    model_config = ConfigDict(strict=True, frozen=True)

    protocol: Literal[1] = 1
    reward: Named
    label: Shown
    version: Named
    images: list[Named] = Field([PNG], max_length=100, fail_fast=True)
    """The media types that the server reads."""
    max_images: PositiveInt | None = None
    """The most images in one request."""
    note: Shown | None = None
    """What users should know about its models."""


class ScoreRequest(BaseModel):
    """The body of POST /score: images as data URLs, one prompt per image.

    Its text must have few values (`has_few_values`) before it is parsed: an error for each of a
    million would take minutes.
    """

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")

    images: list[str] = Field(max_length=MOST_IMAGES, fail_fast=True)
    prompts: Prompts


def encode(images: Images, form: Literal["float32", "png"]) -> list[str]:
    """Encode N images as data URLs: tensors [N, 3, H, W] in [0, 1] as `form`, PIL images as PNG.

    PNG is lossless, in the image's own mode. What is transparent is laid on white, as servers would
    each do in their way. Modes that PNG does not have, such as CMYK, are sent as RGB.
    """
    if not isinstance(images, torch.Tensor):
        return [
            as_png(image if image.mode in PNG_MODES else image.convert("RGB"))
            for image in map(opaque, images)
        ]
    if form == "png":
        return [as_png(image) for image in pil_images(images)]
    return [_as_npy(image) for image in images.detach().to("cpu", torch.float32)]


def as_png(image: Image.Image) -> str:
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return _data_url(PNG, buffer.getvalue())


def _as_npy(image: torch.Tensor) -> str:
    buffer = io.BytesIO()
    np.save(buffer, image.contiguous().numpy().astype(FLOAT32, copy=False), allow_pickle=False)
    return _data_url(NPY, buffer.getvalue())


def _data_url(media: str, data: bytes) -> str:
    return f"data:{media};base64,{base64.b64encode(data).decode()}"


def decode(url: str, most_pixels: int) -> Sent:
    """Decode the image in a data URL; ValueError if it is none or no reward takes its size.

    The size is checked before memory is allocated. most_pixels: that are left for the request.
    """
    head, _, text = url.partition(",")
    media = head.removeprefix("data:").removesuffix(";base64")
    if head != f"data:{media};base64" or media not in (PNG, NPY):
        raise ValueError(f"not a data URL of {PNG} or {NPY} in base64: {url[:40]!r}")
    try:
        data = base64.b64decode(text, validate=True)
    except binascii.Error as error:
        raise ValueError(f"not base64: {error}") from None
    return _decode_png(data, most_pixels) if media == PNG else _decode_npy(data, most_pixels)


def _decode_png(data: bytes, most_pixels: int) -> Sent:
    if not has_few_chunks(data):
        raise ValueError("not a PNG that can be read (too many chunks)")
    try:
        image = Image.open(io.BytesIO(data), formats=["PNG"])
        pixels = _check_pixels(image.width, image.height, most_pixels)
        image.load()
    except (OSError, SyntaxError, Image.DecompressionBombError) as error:
        raise ValueError(
            f"not a PNG that can be read ({' '.join(str(error).split())[:99]})"
        ) from None
    return in_eight_bits(image), pixels


def _decode_npy(data: bytes, most_pixels: int) -> Sent:
    buffer = io.BytesIO(data)
    version = np.lib.format.read_magic(buffer)
    if version != (1, 0):
        raise ValueError(f"a .npy of version {version}; only 1.0 is read")
    try:
        shape, by_columns, dtype = np.lib.format.read_array_header_1_0(buffer)
    # In the header, which NumPy parses as Python
    except (SyntaxError, TokenError, TypeError, RecursionError, MemoryError) as error:
        raise ValueError(f"not a .npy that can be read ({error})") from None
    if len(shape) != 3 or shape[0] != 3 or min(shape) < 1 or by_columns or dtype != FLOAT32:
        raise ValueError(
            f"a .npy of {dtype} {list(shape)}; only [3, H, W] of little-endian float32, by rows, "
            "is read"
        )
    pixels = _check_pixels(shape[2], shape[1], most_pixels)
    if len(data) - buffer.tell() != 3 * pixels * FLOAT32.itemsize:
        raise ValueError(
            f"a .npy of {list(shape)} with {len(data) - buffer.tell()} bytes of values"
        )
    values = np.frombuffer(data, FLOAT32, offset=buffer.tell()).reshape(shape)
    return torch.from_numpy(values.astype(np.float32)), pixels


def _check_pixels(width: int, height: int, most: int) -> int:
    if width * height > most:
        raise ValueError(f"{width * height} pixels; the images of a request may have {most} in all")
    if problem := problem_of_image(width, height):
        raise ValueError(problem)
    return width * height


def answer(scores: Sequence[Scored]) -> dict[str, list]:
    """Return the body of an answer to POST /score; a score that is not finite becomes null."""
    return {
        "scores": [score if math.isfinite(score) else None for score, _ in scores],
        "reasons": [
            None if math.isfinite(score) else why or f"the reward is {score}"
            for score, why in scores
        ],
    }


def read_answer(data: bytes, count: int) -> list[Scored]:
    """Read `count` scores, with a reason for each that is not finite; ValueError for no answer."""
    check_size(data)
    try:
        body = json.loads(data)
        scores, reasons = body["scores"], body.get("reasons") or [None] * count
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        raise ValueError(
            f"not an answer with scores: {data[:200].decode(errors='replace')!r}"
        ) from None
    if (
        not isinstance(scores, list)
        or len(scores) != count
        or not isinstance(reasons, list)
        or len(reasons) != count
    ):
        counts = [
            len(part) if isinstance(part, list) else type(part).__name__
            for part in (scores, reasons)
        ]
        raise ValueError(f"{counts[0]} scores and {counts[1]} reasons for {count} images")
    return [_read_score(score, why) for score, why in zip(scores, reasons)]


def check_size(data: bytes) -> None:
    """Check that an answer has few values, before it is parsed; ValueError otherwise."""
    if not has_few_values(data, MOST_VALUES):
        raise ValueError(f"an answer of over {MOST_VALUES:,} values")


def _read_score(score: object, why: object) -> Scored:
    if score is None:
        return (
            math.nan,
            f"the server: {cut(why)}" if why else "the server gave neither a score nor a reason",
        )
    if isinstance(score, bool) or not isinstance(score, int | float):
        return math.nan, f"not a number: {str(score)[:60]!r}"
    if not abs(score) <= LARGEST:
        return math.nan, f"the score is {str(score)[:60]}"
    return float(score), None


def read_health(data: bytes) -> Health:
    """Read the answer to GET /health; ValueError, readable, if no score server sent it."""
    check_size(data)
    try:
        return Health.model_validate_json(data)
    except ValidationError as error:
        problem = error.errors(include_input=False)[0]
        key = ".".join(map(str, problem["loc"]))
        raise ValueError(
            f"{key + ': ' if key else ''}{problem['msg']}: {data[:200].decode(errors='replace')!r}"
        ) from None
