"""A request from the page, which fits into a link, and the scored images that answer it."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any
from urllib.parse import parse_qs, urlencode

from pydantic import AfterValidator, Field, ValidationError, field_validator

from g2rpo_core.config import Profile
from g2rpo_core.data.prompts import Prompt
from g2rpo_core.foundation.errors import UserError
from g2rpo_core.foundation.files import in_one_line
from g2rpo_core.foundation.runs import BASE
from g2rpo_core.foundation.settings import Settings, problems_of
from g2rpo_core.foundation.texts import normalized, unseen
from g2rpo_core.inference.painter import Painter
from g2rpo_core.inference.pictures import MOST_STEPS, png
from g2rpo_core.inference.runs import drawn_as, find_weights
from g2rpo_core.rewards.preprocess import pil_images
from g2rpo_core.rewards.registry import compares

MANY = ("runs", "rewards")  # fields that a link may repeat
KEPT = 30  # links in the history
LONGEST_LINK = 2**16  # characters: a prompt of 5,000 whose every character takes twelve


def _distinct(names: tuple[str, ...]) -> tuple[str, ...]:
    if len(set(names)) < len(names):
        raise ValueError("a name is there twice")
    return names


# Of runs or rewards: each is drawn or computed, so that none counts twice
Names = Annotated[
    tuple[Annotated[str, Field(max_length=500)], ...],
    Field(max_length=64, fail_fast=True),
    AfterValidator(_distinct),
]


class ImageRequest(Settings):
    """One press of the button."""

    prompt: str = Field(max_length=5000)
    seed: int = Field(
        ge=0, lt=2**32, description="Seeds of the initial noise, as `g2rpo generate --seeds`"
    )
    steps: int = Field(ge=1, le=MOST_STEPS)
    guidance: float | None = Field(
        ge=0,
        le=20,
        description="Guidance scale; null: that of each run's training, and the same for the base.",
    )
    lora_scale: float = Field(ge=0, le=2)
    trained_share: float = Field(gt=0, le=1)
    runs: Names = Field(description="Trained runs to draw beside the base.")
    rewards: Names

    @field_validator("prompt")
    @classmethod
    def _some_text(cls, value: str) -> str:
        if unseen(value):
            raise ValueError("write what to draw")
        return normalized(value)


@dataclass(frozen=True)
class DrawnImage:
    """An image and what is known of it."""

    run: str
    """The run that drew it."""
    png: bytes
    """The image as a PNG file."""
    scores: Mapping[str, float | str]
    """Reward -> score, or the reason for a missing one."""
    seconds: float
    """To draw it."""


def defaults(profile: Profile, runs: Sequence[str]) -> dict[str, Any]:
    """Return the page's defaults: the evaluation's steps, the first run, the training rewards."""
    return {
        "prompt": "",
        "seed": 0,
        "steps": profile.evaluation.steps[0],
        "guidance": None,
        "lora_scale": 1.0,
        "trained_share": 1.0,
        "runs": tuple(runs[:1]),
        "rewards": tuple(name for name in profile.training.rewards if not compares(name)),
    }


def list_rewards(profile: Profile) -> list[str]:
    """List training's and evaluation's rewards, except those that cannot score single images."""
    return [
        name
        for name in dict.fromkeys([*profile.training.rewards, *profile.evaluation.rewards])
        if not compares(name)
    ]


def checked(values: Mapping[str, object]) -> ImageRequest:
    """Check the page's inputs or a link's values; UserError if something does not fit."""
    try:
        return ImageRequest.model_validate(values, strict=False)
    except ValidationError as error:
        raise UserError(in_one_line(problems_of(error, ImageRequest))) from None


def link(asked: ImageRequest) -> str:
    """Return a request as a query string; an empty list of runs or rewards is an empty value."""
    values = {name: value for name, value in asked.model_dump().items() if value is not None}
    return "?" + urlencode(
        {name: value if name not in MANY or value else [""] for name, value in values.items()},
        doseq=True,
    )


def from_link(query: str, usual: Mapping[str, object]) -> ImageRequest:
    """Read the request in a link; UserError if it does not fit; usual: for what it leaves out."""
    try:
        given = parse_qs(
            query.removeprefix("?")[: LONGEST_LINK + 1], keep_blank_values=True, max_num_fields=200
        )
    except ValueError as error:
        raise UserError(f"it has too many fields ({error})") from None
    if len(query) > LONGEST_LINK:
        raise UserError(f"it has over {LONGEST_LINK:,} characters")
    values = {
        key: tuple(filter(None, texts)) if key in MANY else texts[-1]
        for key, texts in given.items()
        if key in usual
    }
    return checked({**usual, **values})


def kept_links(saved: object) -> list[str]:
    """Return the history that a browser sends, which may be anything: at most KEPT links."""
    links = saved if isinstance(saved, list) else []
    return [text for text in links[:KEPT] if isinstance(text, str) and len(text) <= LONGEST_LINK]


def answer(
    painter: Painter, profile: str, offered: Sequence[str], asked: ImageRequest
) -> list[DrawnImage]:
    """Draw and score the request: the base first, then the runs, all with the same noise.

    offered: the allowed runs. UserError for other runs, for unknown rewards, and for a prompt that
    the text encoders would cut.
    """
    for kind, names, known in (
        ("run", asked.runs, offered),
        ("reward", asked.rewards, list_rewards(painter.profile)),
    ):
        if unknown := [name for name in names if name not in known]:
            raise UserError(
                f"there is no {kind} {unknown[0]!r} here, only {', '.join(known) or 'none'}"
            )
    # The same prompt and noise for the base and each run
    (conditioning,) = painter.encode([Prompt("of the page", asked.prompt, "")])
    sampling: dict[str, Any] = asked.model_dump(include={"steps", "trained_share", "lora_scale"})
    drawn = []
    for run, (weights, how) in drawn_as(
        (BASE[0], *asked.runs), profile, painter.profile, asked.guidance
    ).items():
        folder = find_weights(weights, profile)
        # loading is not timed
        painter.policy(folder, how)
        start = time.perf_counter()
        images = painter.draw(folder, conditioning, [asked.seed], sampling=how, **sampling)
        seconds = time.perf_counter() - start
        (scores,) = painter.score(images, asked.prompt, asked.rewards)
        origin = {
            "profile": profile,
            "run": run,
            "prompt": asked.prompt,
            "seed": asked.seed,
            "guidance": how.guidance,
            **sampling,
        }
        (image,) = pil_images(images)
        drawn.append(DrawnImage(run, png(image, origin), scores, seconds))
    return drawn
