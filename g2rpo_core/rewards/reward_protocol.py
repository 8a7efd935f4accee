"""The messages between a client and a score server, as docs/reward_servers.md describes them."""

import base64
import io
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated, Any, Literal, TypeAlias, TypeVar

import numpy as np
import torch
from PIL import Image
from pydantic import BaseModel, BeforeValidator, Field, PositiveInt, ValidationError

from g2rpo_core.rewards.limits import LONGEST_TEXT, MOST_LETTERS
from g2rpo_core.rewards.preprocess import Images, pil_images

PNG, NPY = "image/png", "application/x-npy"
LARGEST = torch.finfo(torch.float32).max  # scores are kept as float32
Sent: TypeAlias = torch.Tensor | Image.Image  # an image, [3, H, W] float32 or PIL
Scored = tuple[float, str | None]  # a score, or NaN and the reason why there is none
MOST_IMAGES = 256  # of a request
Text = Annotated[str, Field(max_length=LONGEST_TEXT)]


class Health(BaseModel):
    """The answer to GET /health."""

    protocol: Literal[1] = 1
    reward: Text
    label: Text
    version: Text
    images: list[Text] = [PNG]
    """The media types that the server reads."""
    max_images: PositiveInt | None = None
    """The most images in one request."""
    note: Text | None = None
    """What users should know about its models."""


def decode(url: str) -> Sent:
    """Decode the image in a data URL, of PNG only the header; ValueError if it is none."""
    head, _, text = url.partition(",")
    try:
        file = io.BytesIO(base64.b64decode(text, validate=True))
        if head == f"data:{PNG};base64":
            return Image.open(file, formats=["PNG"])
        array = np.lib.format.read_array(file, allow_pickle=False)
    except Exception as error:  # noqa: BLE001 - PIL and NumPy raise many
        raise ValueError(f"cannot be read: {error}") from None
    if head != f"data:{NPY};base64" or array.dtype != np.float32 or array.shape[:-2] != (3,):
        raise ValueError(f"no data URL of {PNG}, or of {NPY}: [3, H, W] of little-endian float32")
    return torch.from_numpy(array)


class ScoreRequest(BaseModel, extra="forbid"):
    """The body of POST /score: images as data URLs, one prompt per image."""

    images: list[Annotated[Any, BeforeValidator(decode)]] = Field(
        min_length=1, max_length=MOST_IMAGES
    )
    prompts: list[Annotated[str, Field(max_length=MOST_LETTERS)]]


class ScoreAnswer(BaseModel):
    """The answer to POST /score. A score may be anything: each is looked at by itself."""

    scores: list[Any]
    reasons: list[Any] | None = None


Message = TypeVar("Message", bound=BaseModel)


def parse(schema: type[Message], text: str | bytes | bytearray) -> Message:
    """Read a message; ValueError, of one line, if it is none."""
    try:
        return schema.model_validate_json(text)
    except ValidationError as error:
        problem = error.errors(include_url=False, include_input=False)[0]
        where = [f"{str(part)[:60]}: " for part in problem["loc"]]
        message = problem["msg"].removeprefix("Value error, ")
        raise ValueError("".join(where) + message) from None


def encode(images: Images, form: Literal["float32", "png"]) -> list[str]:
    """Encode N images as data URLs: tensors [N, 3, H, W] in [0, 1] as `form`, PIL images as PNG.

    PNG is lossless. PIL images are sent as RGB, what is transparent on white, as servers would each
    do in their way.
    """
    if isinstance(images, torch.Tensor) and form == "float32":
        arrays = images.detach().to("cpu", torch.float32).contiguous().numpy()
        return [_data_url(NPY, partial(np.save, arr=array)) for array in arrays]
    return [as_png(image) for image in pil_images(images)]


def as_png(image: Image.Image) -> str:
    return _data_url(PNG, lambda file: image.save(file, "PNG"))


def _data_url(media: str, save: Callable[[io.BytesIO], None]) -> str:
    file = io.BytesIO()
    save(file)
    return f"data:{media};base64,{base64.b64encode(file.getvalue()).decode()}"


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
    said = parse(ScoreAnswer, text)
    reasons = said.reasons or [None] * count
    if not len(said.scores) == len(reasons) == count:
        raise ValueError(f"{len(said.scores)} scores and {len(reasons)} reasons for {count} images")
    return [_read_score(score, why) for score, why in zip(said.scores, reasons)]


def _read_score(score: object, why: object) -> Scored:
    if isinstance(score, int | float) and not isinstance(score, bool) and abs(score) <= LARGEST:
        return float(score), None
    reason = f"the server: {why}" if why else f"the score is no number: {score!r}"
    return math.nan, reason[:LONGEST_TEXT]
