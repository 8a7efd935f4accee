"""Define the interface of a reward, its settings, and the `RewardSpec` that describes a built-in one in its own file."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, Protocol, runtime_checkable

import torch
from pydantic import BeforeValidator, Field, model_validator

from g2rpo_core.foundation.settings import Count, Settings
from g2rpo_core.hub.model_store import ModelStore
from g2rpo_core.rewards.addresses import checked_url

if TYPE_CHECKING:
    from g2rpo_core.rewards.preprocess import Images

Section = Mapping[
    str, Mapping[str, object]
]  # the section `rewards` of a profile: name -> settings, not yet checked


class Reward(Protocol):
    """reward(images, prompts) -> float32 [N].

    images: [N, 3, H, W] float in [0, 1], or N PIL images of any size (the verifier only takes
    tensors); prompts: N texts. No gradient; higher is better; ValueError unless there is one prompt
    per image.
    """

    def __call__(self, images: "Images", prompts: Sequence[str]) -> torch.Tensor: ...


class Tokens(NamedTuple):
    """How much of a prompt a reward reads, in its attribute `tokens`; one without it reads all, or it is not known here."""

    limit: int
    """Tokens, those of beginning and end included; what follows is cut."""
    counts: Callable[[Sequence[str]], Sequence[int]]
    """The tokens of each prompt, uncut."""


@runtime_checkable
class RewardWithReasons(Protocol):
    """A reward that can fail on single images: scores [N], with NaN for each missing one, and the reasons."""

    def score_with_reasons(
        self, images: "Images", prompts: Sequence[str]
    ) -> tuple[torch.Tensor, list[str | None]]: ...


@runtime_checkable
class GroupReward(Protocol):
    """A reward that compares the images of a group, so that an image has no score by itself.

    images: N, of which each `group` in a row are one group, for one prompt. Return scores [N], NaN
    where one is missing, and reasons.
    """

    def score_groups(
        self, images: "Images", prompts: Sequence[str], group: int
    ) -> tuple[torch.Tensor, list[str | None]]: ...


Connections = Annotated[int, Field(gt=0, le=10_000)]


class ServerSettings(Settings):
    """A server that a reward asks."""

    url: Annotated[str, BeforeValidator(checked_url)] = Field(
        pattern=r"^https?://\S+$", description="the server's address"
    )
    timeout: float = Field(120, gt=0, le=86_400, description="seconds for one try")
    tries: int = Field(5, gt=0, le=1000, description="of each request")
    backoff: float = Field(
        1.0,
        ge=0,
        le=3600,
        description=(
            "seconds before the second try, doubled before each further one, "
            "and up to as many more at random"
        ),
    )
    concurrency: Connections = Field(16, description="open requests at once")
    key_variable: str | None = Field(
        None, description="the environment variable with the server's key"
    )


class RewardServerSettings(ServerSettings):
    """A score server, such as `g2rpo serve-reward` (docs/reward_servers.md); /health and /score are added to its url."""

    concurrency: Connections = Field(
        4,
        description=(
            "open requests at once; the server scores one after the other, "
            "and each holds its images in memory"
        ),
    )
    reward: str | None = Field(None, description="its name at the server; null: the name here")
    version: str | None = Field(None, description="that the server must have; null: any")
    max_images_per_request: Count = Field(8, description="images in one request")
    images: Literal["float32", "png"] = Field(
        "float32", description="how tensors are sent: exactly, or rounded to 8 bits"
    )


class ChatServerSettings(ServerSettings):
    """A server with OpenAI's chat completions, such as vLLM's or SGLang's, whose url ends in the API's version."""

    model: str = Field(description="its name at the server")
    concurrency: Connections = Field(
        16, description="open requests at once; such servers batch them"
    )


class RewardSettings(Settings):
    """Settings of every reward."""

    max_missing: float = Field(
        0.05,
        ge=0,
        lt=1,
        description="the largest share of images without a score before an evaluation stops",
    )
    server: RewardServerSettings | None = Field(
        None, description="where scores come from; null: computed here"
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
    """Settings of a reward with a model. Scores are always float32; in bfloat16 they do not equal the published package's to 1e-5."""

    micro_batch: Count = Field(256, description="images in one call of the model")
    dtype: Literal["float32", "bfloat16"] = Field(
        "float32", description="of weights and computation"
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
    build: Callable[
        [ModelStore, torch.device, Any], Reward
    ]  # the last argument is of the type `settings`
    """Make the reward from the profile's models, on a device. It imports its libraries when called, so that listing names is fast."""
    settings: type[RewardSettings] = ScorerSettings
    models: tuple[str, ...] = ()
    """Those of the profile's models that it reads, unless its settings are `remote`."""
    open_clip: tuple[str, ...] = ()
    """Those of its models whose entry must name open_clip's architecture."""
    size: ModelSize | None = None
    """None if it is not known."""
    aliases: tuple[str, ...] = ()
    tasks_only: bool = False
    """Whether it only knows captions and images of tiny tasks."""
    calls_in_group: Callable[[Any, int], float] | None = None
    """Of a `GroupReward`, whose settings have `judged_by`: calls of its model per image, of its settings and the group's size.

    None: an image is scored by itself.
    """
    requires: tuple[str, ...] = ()
    """Modules that it needs unless its settings are `remote`; the package's extra of the reward's name brings them."""
    problem_of_prompt: Callable[[str], str | None] = lambda prompt: None
    """Say why no image of a prompt can have a score; None if it can."""
    check: Callable[[Any], object] | None = None
    """Check its settings, unless they are `remote`, without a model; UserError if, for example, a file is missing."""
