"""The messages between a client and a score server, as docs/reward_servers.md describes them."""

import base64
import io
import math
from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypeAlias

import numpy as np
import torch
from PIL import Image
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, PositiveInt, ValidationError

from g2rpo_core.rewards.limits import MOST_LETTERS, cut, problem_of_image
from g2rpo_core.rewards.preprocess import Images, in_eight_bits, opaque, pil_images

PNG, NPY = "image/png", "application/x-npy"
PNG_MODES = {"1", "L", "LA", "P", "RGB", "RGBA", "I;16"}
FLOAT32 = np.dtype("<f4")
LARGEST = torch.finfo(torch.float32).max  # scores are kept as float32
Sent: TypeAlias = torch.Tensor | Image.Image  # an image, [3, H, W] float32 or PIL
Scored = tuple[float, str | None]  # a score, or NaN and the reason why there is none
MOST_IMAGES = 256  # of a request
# What is compared with settings, and what is only shown
Named = Annotated[str, Field(max_length=200)]
Shown = Annotated[str, AfterValidator(cut)]
Prompt = Annotated[str, Field(max_length=MOST_LETTERS)]


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
    """The body of POST /score: images as data URLs, one prompt per image."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")

    images: list[str] = Field(max_length=MOST_IMAGES, fail_fast=True)
    prompts: list[Prompt] = Field(max_length=MOST_IMAGES, fail_fast=True)


class ScoreAnswer(BaseModel):
    """The answer to POST /score. A score may be anything: each is looked at by itself."""

    scores: list[Any]
    reasons: list[Any] | None = None


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


def decode(url: str) -> Sent:
    """Decode the image in a data URL; ValueError if it is none or no reward takes its size."""
    head, _, text = url.partition(",")
    read = {f"data:{PNG};base64": _decode_png, f"data:{NPY};base64": _decode_npy}.get(head)
    if read is None:
        raise ValueError(f"not a data URL of {PNG} or {NPY} in base64: {url[:40]!r}")
    try:
        data = base64.b64decode(text, validate=True)
    except ValueError as error:
        raise ValueError(f"not base64: {error}") from None
    return read(data)


def _decode_png(data: bytes) -> Image.Image:
    try:
        image = Image.open(io.BytesIO(data), formats=["PNG"])
        _check_size(*image.size)
        image.load()
    except (OSError, SyntaxError, Image.DecompressionBombError) as error:
        raise ValueError(f"not a PNG that can be read ({error})") from None
    return in_eight_bits(image)


def _decode_npy(data: bytes) -> torch.Tensor:
    buffer = io.BytesIO(data)
    try:
        np.lib.format.read_magic(buffer)
        shape, by_columns, dtype = np.lib.format.read_array_header_1_0(buffer)
    except Exception as error:  # noqa: BLE001 - NumPy parses the header as Python
        raise ValueError(f"not a .npy that can be read ({error})") from None
    if len(shape) != 3 or shape[0] != 3 or by_columns or dtype != FLOAT32:
        raise ValueError(
            f"a .npy of {dtype} {list(shape)}; only [3, H, W] of little-endian float32, by rows, "
            "is read"
        )
    _check_size(shape[2], shape[1])
    values = np.frombuffer(data, FLOAT32, offset=buffer.tell()).reshape(shape)
    return torch.from_numpy(values.astype(np.float32))


def _check_size(width: int, height: int) -> None:
    if problem := problem_of_image(width, height):
        raise ValueError(problem)


def answer(scores: Sequence[Scored]) -> dict[str, list]:
    """Return the body of an answer to POST /score; a score that is not finite becomes null."""
    return {
        "scores": [score if math.isfinite(score) else None for score, _ in scores],
        "reasons": [
            None if math.isfinite(score) else why or f"the reward is {score}"
            for score, why in scores
        ],
    }


def read_answer(text: str, count: int) -> list[Scored]:
    """Read `count` scores, with a reason for each that is not finite; ValueError for no answer."""
    try:
        said = ScoreAnswer.model_validate_json(text)
    except ValidationError:
        raise ValueError(f"not an answer with scores: {text[:200]!r}") from None
    scores, reasons = said.scores, said.reasons or [None] * count
    if not len(scores) == len(reasons) == count:
        raise ValueError(f"{len(scores)} scores and {len(reasons)} reasons for {count} images")
    return [_read_score(score, why) for score, why in zip(scores, reasons)]


def _read_score(score: object, why: object) -> Scored:
    if score is None:
        why = f"the server: {cut(why)}" if why else "the server gave neither a score nor a reason"
    elif isinstance(score, bool) or not isinstance(score, int | float):
        why = f"not a number: {str(score)[:60]!r}"
    elif abs(score) <= LARGEST:
        return float(score), None
    else:
        why = f"the score is {str(score)[:60]}"
    return math.nan, why


def read_health(text: str) -> Health:
    """Read the answer to GET /health; ValueError, readable, if no score server sent it."""
    try:
        return Health.model_validate_json(text)
    except ValidationError as error:
        raise ValueError(f"{first_problem(error)[1]}: {text[:200]!r}") from None


def first_problem(error: ValidationError) -> tuple[str, str]:
    """Return pydantic's name of the first thing that is wrong, and one line about it."""
    problem = error.errors(include_url=False, include_input=False)[0]
    where = [str(part)[:60] for part in problem["loc"]]
    return problem["type"], ": ".join([*where, problem["msg"]])
