"""Score images by their win rates within the group, judged by a vision-language model (Pref-GRPO).

arXiv 2508.20751. The questions are in templates/, word for word: `think.v1` as
https://github.com/CodeGoat24/Pref-GRPO asks UnifiedReward-Think, and `rank.v1` as
https://github.com/CodeGoat24/UnifiedReward asks UnifiedReward to rank two images. Answers count as
Pref-GRPO counts them: one that names no winner is half a win for both. It rounds win rates to three
decimals, which is not done here.
"""

import re
from collections.abc import Callable, Sequence
from itertools import combinations
from pathlib import Path
from typing import Literal

import torch
from pydantic import Field

from g2rpo_core.foundation.errors import UserError
from g2rpo_core.foundation.settings import Count, Name
from g2rpo_core.rewards.limits import cut
from g2rpo_core.rewards.preprocess import Images, check_pairs, eight_bit
from g2rpo_core.rewards.spec import (
    ChatServerSettings,
    ModelSize,
    RewardServerSettings,
    RewardSettings,
    RewardSpec,
)
from g2rpo_core.rewards.unified_reward import Ask, ChatServer, InProcess, question

FIRST, SECOND, EQUAL = "Image 1 is better", "Image 2 is better", "Both images are equally good"
Pairs = list[tuple[int, int]]  # positions in a group: the image shown first, and the other


class PairwiseSettings(RewardSettings):
    """How images of a group are compared."""

    micro_batch: Count = Field(8, description="Pairs of images per call of the model.")
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        "auto", description="Dtype of weights and computation; `auto`: that of the files."
    )
    template: Literal["think.v1", "rank.v1"] = Field(
        "think.v1",
        description=(
            "Question template of UnifiedReward-Think (`think.v1`) or UnifiedReward (`rank.v1`); "
            "it must match the model."
        ),
    )
    max_new_tokens: Count = Field(
        4096, description="Longest answer in tokens; a longer one has no winner."
    )
    opponents: int | None = Field(
        None,
        ge=2,
        multiple_of=2,
        description=(
            "Opponents per image within its group: half before and half after it, in a ring; null: "
            "all."
        ),
    )
    judged_by: Name = Field(
        "unified_reward",
        description=(
            "Reward that stands for win rates in evaluations and reports, "
            "which score single images."
        ),
    )
    both_orders: bool = Field(
        False,
        description="Ask about each pair in both orders, which cancels a positional bias.",
    )
    # A score server compares nothing, so the field's type is narrower than its base class's
    server: ChatServerSettings | None = Field(  # type: ignore[assignment]
        None, description="Server of the model; null: a model in this process."
    )

    @property
    def score_server(self) -> RewardServerSettings | None:
        return None


def pairs_of(group: int, opponents: int | None, both_orders: bool) -> Pairs:
    """Return the pairs to ask about in a group: all, or a ring where each meets `opponents`.

    Of all pairs, the earlier image is the first.
    """
    if opponents is None or opponents >= group - 1:
        once = list(combinations(range(group), 2))
    else:
        once = [
            (first, (first + step) % group)
            for step in range(1, opponents // 2 + 1)
            for first in range(group)
        ]
    return once + [(second, first) for first, second in once] if both_orders else once


def winner(template: str, answer: str) -> float | None:
    """Return 1.0 if the first image wins, 0.0 if the second does, 0.5 if equal, None if unsaid."""
    if template == "think.v1":
        found = re.search(r"<answer>(.*?)</answer>", answer, re.DOTALL)
        said = found[1] if found else ""
        return 1.0 if FIRST in said else 0.0 if SECOND in said else None
    named = [value for text, value in ((FIRST, 1.0), (SECOND, 0.0), (EQUAL, 0.5)) if text in answer]
    return named[0] if len(named) == 1 else None


class Pairwise:
    """score_groups(images, prompts, group) -> win rates [N] float32 in [0, 1] and reasons.

    Images are rounded to 8 bits, as in files.
    """

    def __init__(self, ask: Ask, settings: PairwiseSettings):
        self.ask, self.settings = ask, settings

    def __call__(self, images: Images, prompts: Sequence[str]) -> torch.Tensor:
        """Raise UserError: an image has no win rate by itself."""
        raise UserError(
            "pairwise compares images of a group: train on it, evaluate by "
            f"{self.settings.judged_by}"
        )

    def score_groups(
        self, images: Images, prompts: Sequence[str], group: int
    ) -> tuple[torch.Tensor, list[str | None]]:
        """Compare the images of each group, G in a row; ValueError unless G divides N.

        A rate is NaN, with a reason, for both images of a pair without an answer, and for a whole
        group of which no answer says anything: such a model was asked in words that it does not
        know.
        """
        check_pairs(images, prompts)
        if len(prompts) % group:
            raise ValueError(f"{len(prompts)} images are no groups of {group}")
        pairs = pairs_of(group, self.settings.opponents, self.settings.both_orders)
        if not pairs:
            return torch.full((len(prompts),), torch.nan), ["no other image in its group"] * len(
                prompts
            )
        # Ask about the pairs of all groups at once
        files = eight_bit(images)
        starts = range(0, len(prompts), group)
        shown = [
            [files[start + first], files[start + second]]
            for start in starts
            for first, second in pairs
        ]
        questions = [
            question(self.settings.template, prompts[start]) for start in starts for _ in pairs
        ]
        answers = self.ask(shown, questions)
        # Count the wins of each group
        rates, reasons = list[float](), list[str | None]()
        for number in range(len(starts)):
            part = slice(number * len(pairs), (number + 1) * len(pairs))
            of_group, why = self._rates(group, pairs, answers[part])
            rates += of_group
            reasons += why
        return torch.tensor(rates), reasons

    def _rates(
        self, group: int, pairs: Pairs, answers: Sequence[str | Exception]
    ) -> tuple[list[float], list[str | None]]:
        """Return a group's win rates [G] from the answers, and the reasons for missing ones."""
        wins, met, said = [0.0] * group, [0] * group, False
        reasons: list[str | None] = [None] * group
        for pair, answer in zip(pairs, answers):
            if isinstance(answer, Exception):
                for place in pair:
                    reasons[place] = f"no answer: {answer}"
                continue
            won = winner(self.settings.template, answer)
            said |= won is not None
            for place, share in zip(pair, (0.5, 0.5) if won is None else (won, 1 - won)):
                wins[place] += share
                met[place] += 1
        if not said:
            example = next((answer for answer in answers if isinstance(answer, str)), "")
            unread = (
                f"no answer names a winner: does template {self.settings.template} fit the model? "
                f"One answer was {cut(repr(example))}"
            )
            reasons = [why or unread for why in reasons]
        return [
            float("nan") if why else won / times for won, times, why in zip(wins, met, reasons)
        ], reasons


def pairwise(
    folder: Callable[[], Path], device: torch.device, settings: PairwiseSettings
) -> Pairwise:
    """Load the reward from its model's folder, or, without calling `folder`, for a server."""
    if settings.server is not None:
        return Pairwise(
            ChatServer(settings.server, settings.server.model, settings.max_new_tokens, "pairwise"),
            settings,
        )
    ask = InProcess(
        folder(), device, settings.micro_batch, settings.max_new_tokens, settings.dtype, "pairwise"
    )
    return Pairwise(ask, settings)


def calls_per_image(settings: PairwiseSettings, group: int) -> float:
    """Return how many pairs are asked about per image of a group."""
    return len(pairs_of(group, settings.opponents, settings.both_orders)) / group


# Qwen2.5-VL-7B in bfloat16, as UnifiedReward; of a pair: two images of 1,369 tokens, the question's
# and answer's some 1,700, and per token keys and values of 28 layers (57 KB) and two states of its
# MLP (76 KB). Two operations per parameter and token.
SIZE = ModelSize(
    8_292_166_656,
    4_440 * (57_344 + 75_776),
    2 * 8.29e9 * 4_440,
    width=2,
    at_once=PairwiseSettings().micro_batch,
)

SPEC = RewardSpec(
    "pairwise",
    "Win rate in its group",
    lambda models, device, settings: pairwise(lambda: models.folder("pairwise"), device, settings),
    settings=PairwiseSettings,
    models=("pairwise",),
    size=SIZE,
    calls_in_group=calls_per_image,
)
