"""What a reward is, and what the project has to know of a built-in one: a `RewardSpec` in the reward's own file."""

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

    images: [N, 3, H, W] float in [0, 1], or N PIL images of any size (the verifier takes tensors alone); prompts: N texts.
    No gradient; higher is better; ValueError unless there is one prompt an image.
    """

    def __call__(self, images: "Images", prompts: Sequence[str]) -> torch.Tensor: ...


@runtime_checkable
class RewardWithReasons(Protocol):
    """A reward that can fail on single images: scores [N] with NaN where one could not be had, and the reasons for these."""

    def score_with_reasons(self, images: "Images", prompts: Sequence[str]) -> tuple[torch.Tensor, list[str | None]]: ...


class RewardSettings(Settings):
    """Of every reward.

    max_missing: the share of images without a score from which an evaluation stops; server: scores come from there.
    """

    max_missing: float = Field(0.05, ge=0, lt=1)
    server: RewardServerSettings | None = None

    @property
    def remote(self) -> bool:
        """Whether scores come from a server, so that no model is needed here."""
        return self.server is not None

    @property
    def score_server(self) -> RewardServerSettings | None:
        """The server if it answers with scores, as docs/reward_servers.md has it."""
        return self.server


class ScorerSettings(RewardSettings):
    """Of a reward with a model. micro_batch: images in one call of it; dtype: of its weights and computation.

    Scores are float32 in any case. In bfloat16 they are not those of the published package to 1e-5.
    """

    micro_batch: Count = 256
    dtype: Literal["float32", "bfloat16"] = "float32"


class BackendSettings(ScorerSettings):
    """Of a reward that a package which people cite can compute in the place of our own code, `native`.

    Equal to 1e-5 and slower: a package takes one image at a time, whatever the micro_batch. It gets images as files hold them, 8 bits.
    """

    backend: str = "native"

    @model_validator(mode="after")
    def _packages_compute_in_float32(self):
        if self.backend != "native" and self.dtype != "float32":
            raise ValueError(f"backend: {self.backend} computes in float32 alone; leave out dtype: {self.dtype}, or take native")
        return self


@dataclass(frozen=True)
class ModelSize:
    """Of the published model, for `g2rpo plan`: parameters; peak bytes of activations and operations for one image.

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

    build: makes it from the profile's models, on a device. It imports what it needs when it is called: whoever only asks for
    names does not wait for libraries. models: those of the profile that it reads, unless its settings are `remote`;
    open_clip: those of them whose entry must name open_clip's architecture. size: None where it is not known.
    shapes_only: it knows captions and images of the shapes task alone.
    """

    name: str
    label: str
    build: Callable[[ModelStore, torch.device, Any], Reward]  # the last of the type `settings`
    settings: type[RewardSettings] = ScorerSettings
    models: tuple[str, ...] = ()
    open_clip: tuple[str, ...] = ()
    size: ModelSize | None = None
    aliases: tuple[str, ...] = ()
    shapes_only: bool = False
