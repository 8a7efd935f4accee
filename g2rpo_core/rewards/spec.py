"""The interface of a reward, its settings, and `RewardSpec`, which describes a built-in one."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple, Protocol, runtime_checkable

import torch
from pydantic import BeforeValidator, Field, model_validator

from g2rpo_core.foundation.settings import Count, Settings
from g2rpo_core.hub.model_store import ModelStore
from g2rpo_core.rewards.addresses import checked_url
from g2rpo_core.rewards.limits import problem_of_image
from g2rpo_core.rewards.preprocess import Images

# The section `rewards` of a profile: name -> settings, not yet checked
Section = Mapping[str, Mapping[str, object]]


class Reward(Protocol):
    """reward(images, prompts) -> float32 [N].

    images: [N, 3, H, W] float in [0, 1], or N PIL images of any size; prompts: N texts. No
    gradient; higher is better; ValueError unless there is one prompt per image.
    """

    def __call__(self, images: Images, prompts: Sequence[str]) -> torch.Tensor: ...


class Tokens(NamedTuple):
    """A reward's attribute `tokens`: how much of a prompt it reads.

    A reward without it reads all of it, or the limit is not known here.
    """

    limit: int
    """Tokens, those of beginning and end included; what follows is cut."""
    counts: Callable[[Sequence[str]], Sequence[int]]
    """The tokens of each prompt, uncut."""


@runtime_checkable
class RewardWithReasons(Protocol):
    """A reward that tells reasons: scores [N], NaN where missing, and a text or None for each.

    A text says why there is no score, or what a score rests on, such as the text that was read.
    """

    def score_with_reasons(
        self, images: Images, prompts: Sequence[str]
    ) -> tuple[torch.Tensor, list[str | None]]: ...

    def __call__(self, images: Images, prompts: Sequence[str]) -> torch.Tensor:
        return self.score_with_reasons(images, prompts)[0]


Connections = Annotated[int, Field(gt=0, le=10_000)]


class ServerSettings(Settings):
    """A server that a reward asks."""

    url: Annotated[str, BeforeValidator(checked_url)] = Field(
        pattern=r"^https?://\S+$", description="Address of the server."
    )
    timeout: float = Field(120, gt=0, le=86_400, description="Seconds per try.")
    tries: int = Field(5, gt=0, le=1000, description="Tries per request.")
    backoff: float = Field(
        1.0,
        ge=0,
        le=3600,
        description=(
            "Seconds before the second try, doubled before each further one; "
            "up to as many are added at random."
        ),
    )
    concurrency: Connections = Field(16, description="Concurrent requests.")
    key_variable: str | None = Field(
        None, description="Environment variable that holds the server's key."
    )


class RewardServerSettings(ServerSettings):
    """A score server, such as `g2rpo serve-reward` (docs/reward_servers.md).

    /health and /score are added to its url.
    """

    concurrency: Connections = Field(
        4,
        description=(
            "Concurrent requests; the server scores one at a time, "
            "and each holds its images in memory."
        ),
    )
    reward: str | None = Field(
        None, description="Name of the reward at the server; null: the name here."
    )
    version: str | None = Field(None, description="Version that the server must report; null: any.")
    max_images_per_request: Count = Field(8, description="Images per request.")
    images: Literal["float32", "png"] = Field(
        "float32",
        description="How tensors are sent: exactly (`float32`), or rounded to 8 bits (`png`).",
    )


class RewardSettings(Settings):
    """Settings of every reward."""

    max_missing: float = Field(
        0.05,
        ge=0,
        lt=1,
        description="Largest share of images without a score; an evaluation stops above it.",
    )
    server: RewardServerSettings | None = Field(
        None, description="Server that computes the scores; null: this process does."
    )

    @property
    def remote(self) -> bool:
        """Return whether scores come from a server, so that no model is needed here."""
        return self.server is not None

    @property
    def score_server(self) -> RewardServerSettings | None:
        """Return the server if it is a score server (docs/reward_servers.md)."""
        return self.server


class ScorerSettings(RewardSettings):
    """Settings of a reward with a model. Scores are always float32.

    In bfloat16 they differ from the published package's by more than 1e-5.
    """

    micro_batch: Count = Field(256, description="Images per call of the model.")
    dtype: Literal["float32", "bfloat16"] = Field(
        "float32", description="Dtype of weights and computation."
    )


class BackendSettings(ScorerSettings):
    """Settings of a reward that a published package can compute instead of our own code, `native`.

    The scores are equal to 1e-5. The package is slower: it takes one image at a time, whatever the
    micro_batch, as 8-bit files hold it.
    """

    backend: str = "native"

    @model_validator(mode="after")
    def _packages_compute_in_float32(self):
        if self.backend != "native" and self.dtype != "float32":
            raise ValueError(
                f"backend: {self.backend} computes only in float32; leave out dtype: {self.dtype}, "
                "or use native"
            )
        return self


@dataclass(frozen=True)
class ModelSize:
    """The size of a published model, for `g2rpo plan`."""

    parameters: int
    bytes_per_image: int
    """Peak bytes of activations."""
    flops_per_image: float
    width: int = 4
    """Bytes of a parameter."""
    at_once: int = 256
    """The most images in one call."""

    @property
    def bytes(self) -> int:
        return self.width * self.parameters


# ViT-H-14: open_clip's parameters; twelve float32 of its 257 x 1280 states at once (residual, norm,
# MLP, ...)
VIT_H_14 = ModelSize(986_109_441, 12 * 257 * 1280 * 4, 0.324e12)


@dataclass(frozen=True)
class RewardSpec:
    """A built-in reward."""

    name: str
    label: str
    build: Callable[[ModelStore, torch.device, Any], Reward]
    """Make the reward from the profile's models, on a device; the last argument is a `settings`.

    It imports its libraries when called, so that listing names is fast.
    """
    settings: type[RewardSettings] = ScorerSettings
    models: tuple[str, ...] = ()
    """Those of the profile's models that it reads, unless its settings are `remote`."""
    open_clip: tuple[str, ...] = ()
    """Those of its models whose entry must name open_clip's architecture."""
    size: ModelSize | None = None
    """None if it is not known."""
    host_seconds: Callable[[Any], float] | None = None
    """Seconds per image on the host's processor, from its settings; None: it is on the device."""
    aliases: tuple[str, ...] = ()
    tasks_only: bool = False
    """Whether it only knows captions and images of tiny tasks."""
    requires: tuple[str, ...] = ()
    """Modules that it needs unless `remote`; the package's extra of the reward's name has them."""
    problem_of_prompt: Callable[[str], str | None] = lambda prompt: None
    """Say why no image of a prompt can have a score; None if it can."""
    problem_of_image: Callable[[int, int], str | None] = problem_of_image
    """Say why no image of a width and height in pixels can have a score; None if it can."""
