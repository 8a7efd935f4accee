"""Rewards by name. Each is built from its models and scores pictures against prompts."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch

from ..model_store import ModelStore

if TYPE_CHECKING:
    from .pictures import Pictures


class Reward(Protocol):
    """score(images, prompts) -> float32 [N].

    images: [N, 3, H, W] float in [0, 1], or N PIL pictures of any size (the verifier takes tensors alone); prompts: N texts.
    No gradient; higher is better; ValueError unless there is one prompt a picture.
    """

    def __call__(self, images: "Pictures", prompts: Sequence[str]) -> torch.Tensor: ...


def _hps(models: ModelStore, device: torch.device) -> Reward:
    from .open_clip import hps

    return hps(models.folder("hps"), device, models.entry("hps")["architecture"])


def _clip_score(models: ModelStore, device: torch.device) -> Reward:
    from .open_clip import clip_score

    return clip_score(models.folder("clip_score"), device)


def _pickscore(models: ModelStore, device: torch.device) -> Reward:
    from .pickscore import pickscore

    return pickscore(models.folder("pickscore"), models.folder("pickscore_processor"), device)


def _image_reward(models: ModelStore, device: torch.device) -> Reward:
    from .image_reward import image_reward

    return image_reward(models.folder("image_reward"), models.folder("image_reward_tokenizer"), device)


def _verifier(models: ModelStore, device: torch.device) -> Reward:
    from ..shapes.verifier import verify

    return verify


# Each imports its libraries when it is built: whoever only asks for the names does not wait for them.
REWARDS: dict[str, Callable[[ModelStore, torch.device], Reward]] = {
    "hps": _hps,
    "clip_score": _clip_score,
    "pickscore": _pickscore,
    "image_reward": _image_reward,
    "verifier": _verifier,
}
LABELS = {
    "hps": "HPS-v2.1",
    "clip_score": "CLIP Score",
    "pickscore": "PickScore",
    "image_reward": "ImageReward",
    "verifier": "Verifier (exact)",
}


def load(names: Sequence[str], models: Path, device: torch.device | str = "cpu") -> dict[str, Reward]:
    """The rewards of those names, in their order, from the `models` stage's folder."""
    store = ModelStore(models)
    return {name: REWARDS[name](store, torch.device(device)) for name in names}


def score_all(rewards: Mapping[str, Reward], images: torch.Tensor, prompts: Sequence[str]) -> torch.Tensor:
    """[R, N] float32: every reward of every picture."""
    return torch.stack([reward(images, prompts).float().to(images.device) for reward in rewards.values()])
