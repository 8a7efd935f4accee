"""Blind votes: draw two images of a prompt, let a person choose, and keep the vote."""

import io
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import uuid4

from PIL.Image import Image
from pydantic import Field, ValidationError

from g2rpo_core.data.prompts import captions, given_prompts, load_prompts
from g2rpo_core.foundation.errors import UserError
from g2rpo_core.foundation.files import in_one_line
from g2rpo_core.foundation.settings import Settings, problems_of
from g2rpo_core.foundation.texts import normalized, unseen, visible
from g2rpo_core.inference.demo.answer import Names
from g2rpo_core.inference.painter import Painter
from g2rpo_core.inference.pictures import png
from g2rpo_core.inference.runs import drawn_as, find_weights
from g2rpo_core.inference.votes import add_vote
from g2rpo_core.rewards.preprocess import pil_images
from g2rpo_core.rewards.votes import SIDES
from g2rpo_core.tasks import TASK_NAMES

OFFERED = 50  # training prompts that the page begins with
LONGEST_NAME = 100  # characters of a voter's name


class PairRequest(Settings):
    """What the tab sends to have a pair drawn."""

    prompts: str = Field(max_length=2**18, description="A line each.")
    runs: Names


@dataclass(frozen=True)
class Candidate:
    """One of two images, with what the page says only after the vote."""

    run: str
    seed: int
    image: Image
    origin: dict[str, Any]
    """What made it, for the file; the page shows the image without it."""

    @property
    def shown(self) -> bytes:
        """Return the image as a PNG that does not say what made it."""
        file = io.BytesIO()
        self.image.save(file, "PNG")
        return file.getvalue()


@dataclass(frozen=True)
class Pair:
    """Two images of one prompt, in an order that was drawn."""

    prompt: str
    left: Candidate
    right: Candidate
    id: str = field(default_factory=lambda: uuid4().hex)
    """Of this pair, so that a press of a button counts only for the pair that it was meant for."""


def offered_prompts(painter: Painter, profile: str) -> str:
    """Return the first training prompts, a line each, or '' if there are none.

    Votes on test prompts would leak them into training.
    """
    made, source = Path("prompts", profile, "train.parquet"), painter.profile.prompts.train
    if made.exists():
        prompts = load_prompts(made)
    elif source in TASK_NAMES:
        prompts = captions(str(source), OFFERED, painter.profile.prompts.seed, testing=False)
    else:
        prompts = []
    return "\n".join(prompt.text for prompt in prompts[:OFFERED])


def draw_pair(
    painter: Painter,
    profile: str,
    offered: Sequence[str],
    prompts: object,
    runs: object,
    chance: random.Random,
) -> Pair:
    """Draw a prompt by two of the runs from one noise; by a single run from two noises.

    prompts, runs: of a `PairRequest`, unchecked; offered: the allowed runs. UserError for no prompt
    or run, for another run, and for a prompt that is too long.
    """
    try:
        asked = PairRequest.model_validate({"prompts": prompts, "runs": runs}, strict=False)
    except ValidationError as error:
        raise UserError(in_one_line(problems_of(error, PairRequest))) from None
    lines, runs = [line for line in asked.prompts.splitlines() if not unseen(line)], asked.runs
    if not lines:
        raise UserError("write prompts to vote on, one on each line")
    if not runs:
        raise UserError("tick the runs to compare; of one alone, two seeds are compared")
    if unknown := [run for run in runs if run not in offered]:
        raise UserError(f"there is no run {unknown[0]!r} here, only {', '.join(offered)}")
    first, second = chance.sample(list(runs), 2) if len(runs) > 1 else (runs[0], runs[0])
    seed = chance.randrange(2**32)
    seeds = (seed, seed if first != second else (seed + 1 + chance.randrange(2**32 - 1)) % 2**32)
    prompt, settings = given_prompts([chance.choice(lines)])[0], painter.profile
    (conditioning,) = painter.encode([prompt])
    steps = settings.evaluation.steps[0]
    drawn = drawn_as(dict.fromkeys((first, second)), profile, settings)

    def candidate(run: str, seed: int) -> Candidate:
        _, how = drawn[run]
        images = painter.draw(find_weights(run, profile), conditioning, [seed], steps, how)
        (image,) = pil_images(images)
        about: dict[str, Any] = {
            "profile": profile,
            "run": run,
            "prompt": prompt.text,
            "seed": seed,
            "steps": steps,
        }
        return Candidate(run, seed, image, about | {"guidance": how.guidance})

    return Pair(prompt.text, candidate(first, seeds[0]), candidate(second, seeds[1]))


def keep(file: Path, pair: Pair, winner: str, voter: object) -> None:
    """Append the vote on a pair to the file (see `add_vote`).

    winner: left, right or equal. UserError for too long a name; its
    controlling characters are kept as their codes.
    """
    name = normalized(voter if isinstance(voter, str) else "")
    if len(name) > LONGEST_NAME:
        raise UserError(f"a voter's name has at most {LONGEST_NAME} characters")
    sides = dict(zip(SIDES, (pair.left, pair.right)))
    about = {
        f"{side}_{key}": value
        for side, one in sides.items()
        for key, value in (("run", one.run), ("seed", one.seed))
    }
    images = {side: png(one.image, one.origin) for side, one in sides.items()}
    vote = {
        "prompt": pair.prompt,
        "winner": winner,
        "voter": visible(name),
        "pair": pair.id,
        **about,
    }
    add_vote(file, vote, images)
