"""Score images with several rewards, with a reason for each missing score."""

import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import pandas as pd
import torch

from g2rpo_core.data.prompts import Prompt, note_longer
from g2rpo_core.foundation.errors import UserError
from g2rpo_core.foundation.texts import echo
from g2rpo_core.rewards.preprocess import Images
from g2rpo_core.rewards.spec import Reward, RewardWithReasons


class Scores(NamedTuple):
    """Scores of images by every reward."""

    values: torch.Tensor
    """[R, N] float32, NaN where a score is missing."""
    reasons: list[list[str | None]]
    """Why a score is missing, or what it rests on, if told; by reward and image."""


def score_all(
    rewards: Mapping[str, Reward], images: torch.Tensor, prompts: Sequence[str]
) -> Scores:
    """Score every image [N, 3, H, W] with every reward, with reasons for missing scores."""
    values, reasons = zip(*(score_one(reward, images, prompts) for reward in rewards.values()))
    stacked = torch.stack([scores.float().to(images.device) for scores in values])
    return Scores(stacked.masked_fill(~stacked.isfinite(), math.nan), list(reasons))


def score_one(
    reward: Reward, images: Images, prompts: Sequence[str]
) -> tuple[torch.Tensor, list[str | None]]:
    """Score images with one reward: scores [N], and reasons, at least for those not finite."""
    if isinstance(reward, RewardWithReasons):
        return reward.score_with_reasons(images, prompts)
    scores = reward(images, prompts)
    return scores, [
        None if math.isfinite(value) else f"the reward is {value}" for value in scores.tolist()
    ]


def score_table(
    rewards: Mapping[str, Reward], prompts: list[Prompt], images: torch.Tensor
) -> pd.DataFrame:
    """Return a row per prompt and reward: prompt_id, style, reward, score, reason.

    A missing score is NaN and has a reason; others may have one.
    """
    scores, reasons = score_all(rewards, images, [prompt.text for prompt in prompts])
    rows = [
        {
            "prompt_id": prompt.id,
            "style": prompt.style,
            "reward": name,
            "score": value,
            "reason": reason,
        }
        for name, values, why in zip(rewards, scores.tolist(), reasons)
        for prompt, value, reason in zip(prompts, values, why)
    ]
    return pd.DataFrame(rows).astype({"reason": "string"})


def note_cut(rewards: Mapping[str, Reward], prompts: Iterable[str]) -> None:
    """Print for each reward how many prompts it truncates, and the longest; and what it notes.

    Call it once, with all prompts of a run.
    """
    texts = list(dict.fromkeys(prompts))
    for name, reward in rewards.items():
        if tokens := getattr(reward, "tokens", None):
            note_longer(name, list(zip(texts, tokens.counts(texts))), tokens.limit)
        if note := getattr(reward, "note", lambda prompts: None)(texts):
            echo(f"note: {name} {note}", file=sys.stderr)


def check_missing(name: str, missing: int, total: int, largest: float, reason: str = "") -> None:
    """Check that at most the share `largest` of scores is missing; else UserError.

    reason: an example for its message.
    """
    if missing > largest * total:
        raise UserError(
            f"reward {name}: {missing} of {total} scores are missing, "
            f"more than rewards.{name}.max_missing = {largest:g} allows; for example: {reason}"
        )
