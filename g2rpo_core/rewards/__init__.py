"""Rewards by name. Each is built from its models and scores pictures against prompts."""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol, runtime_checkable

import torch

from ..model_store import ModelStore
from .settings import RewardSettings, ScorerSettings, Section, UnifiedRewardSettings, settings_of

if TYPE_CHECKING:
    from .pictures import Pictures


class Reward(Protocol):
    """score(images, prompts) -> float32 [N].

    images: [N, 3, H, W] float in [0, 1], or N PIL pictures of any size (the verifier takes tensors alone); prompts: N texts.
    No gradient; higher is better; ValueError unless there is one prompt a picture.
    """

    def __call__(self, images: "Pictures", prompts: Sequence[str]) -> torch.Tensor: ...


@runtime_checkable
class Judge(Protocol):
    """A reward that can fail on single pictures: judge(images, prompts) -> scores as above with NaN, and the reasons for these."""

    def judge(self, images: torch.Tensor, prompts: Sequence[str]) -> tuple[torch.Tensor, list[str | None]]: ...


def _hps(models: ModelStore, device: torch.device, settings: ScorerSettings) -> Reward:
    from .open_clip import hps

    return hps(models.folder("hps"), device, models.entry("hps")["architecture"], settings)


def _clip_score(models: ModelStore, device: torch.device, settings: ScorerSettings) -> Reward:
    from .open_clip import clip_score

    return clip_score(models.folder("clip_score"), device, settings)


def _pickscore(models: ModelStore, device: torch.device, settings: ScorerSettings) -> Reward:
    from .pickscore import pickscore

    return pickscore(models.folder("pickscore"), models.folder("pickscore_processor"), device, settings)


def _image_reward(models: ModelStore, device: torch.device, settings: ScorerSettings) -> Reward:
    from .image_reward import image_reward

    return image_reward(models.folder("image_reward"), models.folder("image_reward_tokenizer"), device, settings)


def _verifier(models: ModelStore, device: torch.device, settings: RewardSettings) -> Reward:
    from ..shapes.verifier import verify

    return verify


def _unified_reward(models: ModelStore, device: torch.device, settings: UnifiedRewardSettings) -> Reward:
    from .unified_reward import unified_reward

    return unified_reward(lambda: models.folder("unified_reward"), device, settings)


# Each imports its libraries when it is built: whoever only asks for the names does not wait for them.
REWARDS: dict[str, Callable[[ModelStore, torch.device, RewardSettings], Reward]] = {
    "hps": _hps,
    "clip_score": _clip_score,
    "pickscore": _pickscore,
    "image_reward": _image_reward,
    "unified_reward": _unified_reward,
    "verifier": _verifier,
}
# Which of the profile's models each reads; UnifiedReward only without a server.
MODELS = {
    "hps": ("hps",),
    "clip_score": ("clip_score",),
    "pickscore": ("pickscore", "pickscore_processor"),
    "image_reward": ("image_reward", "image_reward_tokenizer"),
    "unified_reward": ("unified_reward",),
    "verifier": (),
}
LABELS = {
    "hps": "HPS-v2.1",
    "clip_score": "CLIP Score",
    "pickscore": "PickScore",
    "image_reward": "ImageReward",
    "unified_reward": "UnifiedReward",
    "verifier": "Verifier (exact)",
}


def labels(section: Section) -> dict[str, str]:
    """The name in reports of every reward that is built in or in the section `rewards`."""
    own = {name: str(entry.get("label") or name) for name, entry in section.items() if name not in REWARDS}
    return LABELS | own


def max_missing(names: Sequence[str], section: Section) -> dict[str, float]:
    """Of each reward, the largest share of scores that may be missing before a run stops."""
    return {name: settings_of(section, name, REWARDS).max_missing for name in names}


def load(
    names: Sequence[str], models: Path, device: torch.device | str = "cpu", section: Section | None = None
) -> dict[str, Reward]:
    """The rewards of those names, in their order, from the `models` stage's folder; `section`: that of the profile."""
    return {name: _build(name, models, torch.device(device), section or {}) for name in names}


def _build(name: str, models: Path, device: torch.device, section: Section) -> Reward:
    settings = settings_of(section, name, REWARDS)
    if name in REWARDS:
        return REWARDS[name](ModelStore(models), device, settings)
    from .own import Own

    return Own(name, settings)


class Scores(NamedTuple):
    """values: [R, N] float32, every reward of every picture, NaN where one could not be had; reasons: why, else None."""

    values: torch.Tensor
    reasons: list[list[str | None]]


def judge_all(rewards: Mapping[str, Reward], images: torch.Tensor, prompts: Sequence[str]) -> Scores:
    """Every reward of every picture; a reward with a method `judge` says itself why a score is missing."""
    judged = [
        reward.judge(images, prompts) if isinstance(reward, Judge) else (reward(images, prompts), None)
        for reward in rewards.values()
    ]
    values = torch.stack([scores.float().to(images.device) for scores, _ in judged])
    plain = [[None if math.isfinite(value) else f"the reward is {value}" for value in row] for row in values.tolist()]
    values = values.masked_fill(~values.isfinite(), math.nan)
    return Scores(values, [reasons or found for (_, reasons), found in zip(judged, plain)])


def score_all(rewards: Mapping[str, Reward], images: torch.Tensor, prompts: Sequence[str]) -> torch.Tensor:
    """[R, N] float32: every reward of every picture, NaN where one could not be had."""
    return judge_all(rewards, images, prompts).values
