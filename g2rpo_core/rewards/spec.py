"""The interface of a reward, and the description of a built-in one: a `RewardSpec` in the reward's own file."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

import torch
from pydantic import Field, model_validator

from g2rpo_core.common.model_store import ModelStore
from g2rpo_core.rewards.server_settings import RewardServerSettings
from g2rpo_core.settings import Count, Settings

if TYPE_CHECKING:
    from g2rpo_core.rewards.preprocess import Images

Section = Mapping[str, Mapping[str, object]]  # the section `rewards` of a profile: name -> settings, not yet checked


class Reward(Protocol):
    """reward(images, prompts) -> float32 [N].

    images: [N, 3, H, W] float in [0, 1], or N PIL images of any size (the verifier only takes tensors); prompts: N texts.
    No gradient; higher is better; ValueError unless there is one prompt per image.
    """

    def __call__(self, images: "Images", prompts: Sequence[str]) -> torch.Tensor: ...


@runtime_checkable
class RewardWithReasons(Protocol):
    """A reward that can fail on single images: scores [N], with NaN for each missing one, and the reasons."""

    def score_with_reasons(self, images: "Images", prompts: Sequence[str]) -> tuple[torch.Tensor, list[str | None]]: ...


class RewardSettings(Settings):
    """Settings of every reward.

    max_missing: the largest share of images without a score before an evaluation stops; server: where scores come from, if set.
    """

    max_missing: float = Field(0.05, ge=0, lt=1)
    server: RewardServerSettings | None = None

    @property
    def remote(self) -> bool:
        """Whether scores come from a server, so that no model is needed here."""
        return self.server is not None

    @property
    def score_server(self) -> RewardServerSettings | None:
        """The server, if it is a score server (docs/reward_servers.md)."""
        return self.server


class ScorerSettings(RewardSettings):
    """Settings of a reward with a model. micro_batch: images in one call of it; dtype: of its weights and computation.

    Scores are always float32. In bfloat16 they do not equal those of the published package to 1e-5.
    """

    micro_batch: Count = Field(256, description="images in one call of the model")
    dtype: Literal["float32", "bfloat16"] = "float32"


class BackendSettings(ScorerSettings):
    """Settings of a reward that a published package can compute instead of our own code, `native`.

    The scores are equal to 1e-5. The package is slower: it takes one image at a time, whatever the micro_batch. It gets 8-bit
    images, as files hold them.
    """

    backend: str = "native"

    @model_validator(mode="after")
    def _packages_compute_in_float32(self):
        if self.backend != "native" and self.dtype != "float32":
            raise ValueError(f"backend: {self.backend} computes only in float32; leave out dtype: {self.dtype}, or use native")
        return self


@dataclass(frozen=True)
class ModelSize:
    """The size of the published model, for `g2rpo plan`: parameters; peak bytes of activations and operations for one image.

    width: bytes of a parameter; at_once: images in one call, at most.
    """

    parameters: int
    bytes_per_image: int
    flops_per_image: float
    width: int = 4
    at_once: int = 256

    @property
    def bytes(self) -> int:
        return self.width * self.parameters


# ViT-H-14: open_clip's parameters; twelve float32 of its 257 x 1280 states at once (residual, norm, MLP, ...)
VIT_H_14 = ModelSize(986_109_441, 12 * 257 * 1280 * 4, 0.324e12)


@dataclass(frozen=True)
class RewardSpec:
    """A built-in reward.

    build: makes it from the profile's models, on a device. It imports what it needs when it is called, so that listing names
    does not wait for libraries. models: those of the profile that it reads, unless its settings are `remote`;
    open_clip: those of them whose entry must name open_clip's architecture. size: None if it is not known.
    worlds_only: it only knows captions and images of tiny worlds.
    """

    name: str
    label: str
    build: Callable[[ModelStore, torch.device, Any], Reward]  # the last argument is of the type `settings`
    settings: type[RewardSettings] = ScorerSettings
    models: tuple[str, ...] = ()
    open_clip: tuple[str, ...] = ()
    size: ModelSize | None = None
    aliases: tuple[str, ...] = ()
    worlds_only: bool = False
