"""A reward fitted to human votes: a linear Bradley-Terry head on features of CLIP Score's model.

A vote says which of two images of one prompt is better. With phi(image, prompt) = [f, f * t], unit
vectors f of the image and t of the prompt, the odds that the left image wins are
exp(w . (phi(left) - phi(right))) (Bradley and Terry, 1952), and the score is w . phi: a difference
of 1 means odds of e. All ones on f * t would be CLIP Score itself. Features of the prompt alone
cancel. The model is the profile's.

The votes are a Parquet file (`SCHEMA`, a row per vote), with the images beside it. `g2rpo demo`
writes both.
"""

import hashlib
import json
import re
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import torch
import torch.nn.functional as F
from PIL import Image
from pydantic import Field
from safetensors.torch import load, save

from g2rpo_core.foundation.claims import one_at_a_time
from g2rpo_core.foundation.errors import UserError
from g2rpo_core.foundation.files import (
    complaint,
    existing,
    in_one_line,
    reading,
    shown,
    whole,
    write_whole,
)
from g2rpo_core.foundation.manifest import find_whole, sha256, write_manifest
from g2rpo_core.foundation.settings import Scale
from g2rpo_core.foundation.tables import read_table
from g2rpo_core.foundation.texts import unprintable, unseen
from g2rpo_core.hub.model_store import ModelStore
from g2rpo_core.rewards.preprocess import Images, read_image
from g2rpo_core.rewards.similarity import CosineScore, clip_score
from g2rpo_core.rewards.spec import VIT_H_14, Reward, RewardSpec, ScorerSettings
from g2rpo_core.sampling.seeding import seed_of

SIDES = ("left", "right")
EQUAL = "equal"
WINS = {"left": 1.0, EQUAL: 0.5, "right": 0.0}  # winner -> what the left image won
_OF_A_SIDE = {"file": pa.string(), "sha256": pa.string(), "run": pa.string(), "seed": pa.int64()}
SCHEMA = pa.schema(
    {"prompt": pa.string(), "winner": pa.string()}
    | {f"{side}_{name}": kind for side in SIDES for name, kind in _OF_A_SIDE.items()}
    | {"time": pa.timestamp("us", tz="UTC"), "voter": pa.string(), "pair": pa.string()}
)
LONGEST_TEXT = 5000  # characters, as of the demo's prompts
SINCE = {"pair": ""}  # a column that older files do not have -> its value there
LEAST_VOTES, LEAST_PROMPTS = 30, 5  # to fit: votes that are not `equal`, and their prompts
FOLDS = 5
FORM = "1"  # of the head: raise it when features or fit change, so that kept heads are fitted again


class VotesSettings(ScorerSettings):
    """Settings of the reward fitted to votes; micro_batch and dtype are CLIP Score's model's."""

    file: str | None = Field(
        None, description="File of votes, such as votes/tiny.parquet; the images are beside it."
    )
    sha256: str | None = Field(
        None,
        pattern="^[0-9a-f]{64}$",
        description="Hash of the file; new votes rerun what uses them. Printed by `g2rpo votes`.",
    )
    l2: Scale = Field(
        1.0,
        description="Prior's strength: adds l2 / 2 * |w|^2 to the summed log loss of the votes.",
    )


def read_votes(file: Path) -> pd.DataFrame:
    """Read the votes, a row each (`SCHEMA`).

    UserError if the file is missing or damaged, or if a value does not fit; it names the rows.
    """
    there = read_table(existing(file))
    with reading(file):
        without = {key: value for key, value in SINCE.items() if key not in there}
        there = there.assign(**without).fillna(SINCE)
    if lacking := [name for name in SCHEMA.names if name not in there]:
        raise UserError(complaint(file, f"has no column {lacking[0]!r}"))
    with reading(file):
        rows = there[SCHEMA.names].astype(object).to_dict("records")
    wrong = [
        f"row {number}: has the {name} {shown(repr(row[name])[:60])}, {but}"
        for number, row in enumerate(rows, 1)
        for name, (fits, but) in ROW.items()
        if not fits(row[name])
    ]
    if wrong:
        raise UserError(complaint(file, in_one_line(wrong)))
    with reading(file):
        return pa.Table.from_pylist(rows, schema=SCHEMA).to_pandas()


def _is_text(value: object) -> bool:
    return isinstance(value, str) and len(value) <= LONGEST_TEXT


def _is_inside(value: Any) -> bool:
    """Say whether a value is the path of a file in the folder of the votes."""
    path = PurePosixPath(value if _is_text(value) and not unprintable(value) else "/")
    return bool(path.name) and not path.is_absolute() and ".." not in path.parts


def _is_seed(value: Any) -> bool:
    number = isinstance(value, int | float | np.integer) and not isinstance(value, bool)
    return bool(number and 0 <= value < 2**63 and value % 1 == 0)  # no NaN


# Column -> whether a value fits, and what is wrong with one that does not
ROW: dict[str, tuple[Callable[[Any], bool], str]] = {
    "prompt": (lambda value: _is_text(value) and not unseen(value), "which is no text"),
    "winner": (lambda value: isinstance(value, str) and value in WINS, f"not {', '.join(WINS)}"),
    "time": (
        lambda value: isinstance(value, datetime) and not pd.isna(value) and bool(value.tzinfo),
        "which is no time with its zone",
    ),
    "voter": (_is_text, "which is no text"),
    "pair": (_is_text, "which is no text"),
}
for _side in SIDES:
    ROW |= {
        f"{_side}_file": (_is_inside, "which leads out of its folder"),
        f"{_side}_sha256": (
            lambda value: isinstance(value, str) and bool(re.fullmatch("[0-9a-f]{64}", value)),
            "which is no hash",
        ),
        f"{_side}_run": (lambda value: _is_text(value) and value != "", "which is no name"),
        f"{_side}_seed": (_is_seed, "which is no whole number from 0"),
    }


def decided(table: pd.DataFrame) -> pd.DataFrame:
    """Return the votes that name a better image."""
    return table[table.winner != EQUAL]


def enough(file: Path, table: pd.DataFrame) -> None:
    """Check that there are votes enough to fit a head; UserError otherwise."""
    votes, prompts = len(decided(table)), decided(table).prompt.nunique()
    if votes < LEAST_VOTES or prompts < LEAST_PROMPTS:
        raise UserError(
            f"{file}: a reward needs at least {LEAST_VOTES} votes that name a better image, "
            f"on {LEAST_PROMPTS} prompts; there are {votes} "
            f"on {prompts}: vote more in `g2rpo demo`"
        )


def read_images(file: Path, table: pd.DataFrame, side: str) -> list[Image.Image]:
    """Read each vote's left or right image; UserError unless it is the one that was voted on."""
    images = []
    for name, expected in zip(table[f"{side}_file"], table[f"{side}_sha256"]):
        path = whole(file.parent / name)
        if sha256(path) != expected:
            raise UserError(complaint(path, f"is not the image of the vote in {file}: restore it"))
        images.append(read_image(path).convert("RGB"))
    return images


def features(scorer: CosineScore, images: Images, prompts: Sequence[str]) -> torch.Tensor:
    """Return phi(image, prompt) = [f, f * t], [N, 2 D] float32."""
    image, text = scorer.features(images, prompts)
    return torch.cat([image, image * text], 1)


def differences(scorer: CosineScore, file: Path, table: pd.DataFrame) -> torch.Tensor:
    """Return phi(left) - phi(right) of each vote, [V, 2 D] float64 on the CPU."""
    parts = []
    for start in range(0, len(table), scorer.micro_batch):
        part = table.iloc[start : start + scorer.micro_batch]
        left, right = (
            features(scorer, read_images(file, part, side), list(part.prompt)) for side in SIDES
        )
        parts.append((left.double() - right.double()).cpu())
    return torch.cat(parts)


def won(table: pd.DataFrame) -> torch.Tensor:
    """Return what the left image won in each vote, [V] float64: 1, 0.5 if both are equal, or 0."""
    return torch.tensor(table.winner.map(WINS).to_numpy(), dtype=torch.float64)


def gradient(
    weights: torch.Tensor, scaled: torch.Tensor, wins: torch.Tensor, l2: float
) -> torch.Tensor:
    """Return the gradient [F] of the log loss and its prior.

    That is of sum(softplus(z) - wins * z) + l2 / 2 * |w|^2 with z = scaled @ w.
    """
    return scaled.T @ (torch.sigmoid(scaled @ weights) - wins) + l2 * weights


def scale_of(differences: torch.Tensor) -> torch.Tensor:
    """Return factors [2 D], one per half, that scale each half's mean squared norm to 1."""
    halves = [
        half.square().sum(1).mean().sqrt().expand(half.shape[1]) for half in differences.chunk(2, 1)
    ]
    return 1 / torch.cat(halves).clamp_min(1e-12)


def fit(differences: torch.Tensor, wins: torch.Tensor, l2: float) -> torch.Tensor:
    """Fit weights [2 D] float64 by L2-regularised logistic regression on differences [V, 2 D].

    The prior holds for features as `scale_of` scales them. Deterministic: the objective is strictly
    convex, and LBFGS starts at 0.
    """
    scale = scale_of(differences)
    scaled, weights = differences * scale, torch.zeros(differences.shape[1], dtype=torch.float64)
    steps = torch.optim.LBFGS(
        [weights],
        max_iter=1000,
        tolerance_grad=1e-10,
        tolerance_change=0,
        history_size=50,
        line_search_fn="strong_wolfe",
    )

    @torch.no_grad()
    def loss() -> torch.Tensor:
        weights.grad = gradient(weights, scaled, wins, l2)
        z = scaled @ weights
        return (F.softplus(z) - wins * z).sum() + l2 / 2 * weights.square().sum()

    steps.step(loss)
    return weights * scale


def cross_validate(differences: torch.Tensor, table: pd.DataFrame, l2: float) -> tuple[int, int]:
    """Count the votes whose winner a head predicts that has not seen their prompts, and all votes.

    Votes for `equal` are left out.
    """
    prompts = sorted(table.prompt.unique(), key=lambda prompt: seed_of("votes", prompt))
    fold = torch.tensor(
        table.prompt.map({prompt: rank % FOLDS for rank, prompt in enumerate(prompts)}).to_numpy()
    )
    wins, right, count = won(table), 0, 0
    for held_out in range(FOLDS):
        asked = (fold == held_out) & (wins != 0.5)
        z = differences[asked] @ fit(differences[fold != held_out], wins[fold != held_out], l2)
        right, count = right + int(((z > 0) == (wins[asked] > 0.5)).sum()), count + int(asked.sum())
    return right, count


class VotesReward:
    """w . phi(image, prompt), [N] float32; weights: [2 D] float32 on the scorer's device."""

    def __init__(self, scorer: CosineScore, weights: torch.Tensor):
        self.scorer, self.weights, self.tokens = scorer, weights, scorer.tokens

    def __call__(self, images: Images, prompts: Sequence[str]) -> torch.Tensor:
        return (features(self.scorer, images, prompts) * self.weights).sum(1)


def check(settings: VotesSettings) -> Path:
    """Return the file of votes; UserError if its hash differs or it has too few votes."""
    if settings.file is None:
        raise UserError(
            "rewards.votes.file: name the file of votes, such as votes/tiny.parquet; "
            "`g2rpo demo` writes it"
        )
    file = whole(existing(Path(settings.file)))
    if (found := sha256(file)) != settings.sha256:
        named = (
            f"is of other votes than {file} has now"
            if settings.sha256
            else f"has to name the votes of {file}"
        )
        raise UserError(
            f"rewards.votes.sha256: {named}: write `sha256: {found}`, "
            "and what uses the reward runs again"
        )
    enough(file, read_votes(file))
    return file


def kept_head(models: ModelStore, scorer: CosineScore, settings: VotesSettings) -> torch.Tensor:
    """Return the head's weights [2 D] float32: those kept beside the votes, or newly fitted.

    Kept ones count only if they were fitted to just this. The processes of a run wait for the one
    that fits, so that all have the same weights.
    """
    model = hashlib.sha256(
        json.dumps(models.entry("clip_score")["files"], sort_keys=True).encode()
    ).hexdigest()
    decides = {
        "votes": settings.sha256,
        "clip_score": model,
        "l2": settings.l2,
        "dtype": settings.dtype,
        "form": FORM,
    }
    file = check(settings)
    head, mark = file.with_suffix(".safetensors"), file.with_suffix(".head.json")
    with one_at_a_time(lock_of(file)):
        check(settings)  # somebody may have voted meanwhile
        if find_whole(mark, head.parent) == decides:
            return load(head.read_bytes())["weights"]
        table = read_votes(file)
        weights = fit(differences(scorer, file, table), won(table), settings.l2).float()
        write_whole(head, save({"weights": weights}))
        write_manifest(mark, head.parent, [head.name], decides)
    return weights


def lock_of(file: Path) -> Path:
    """Return the lock file that serializes writes of the votes and of what lies beside them."""
    return file.with_name(f".{file.stem}.lock")


def build(models: ModelStore, device: torch.device, settings: VotesSettings) -> Reward:
    """Build the reward, whose head is fitted here if it is not kept; UserError as `check`."""
    check(settings)  # before a model is read
    scorer = clip_score(models.folder("clip_score"), device, settings)
    return VotesReward(scorer, kept_head(models, scorer, settings).to(device))


SPEC = RewardSpec(
    "votes",
    "Human votes",
    build,
    settings=VotesSettings,
    models=("clip_score",),
    size=VIT_H_14,
    check=check,
)
