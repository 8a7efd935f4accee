"""The section `sampling` of a profile."""

from typing import Any, Literal

from pydantic import Field, field_validator

from g2rpo_core.foundation.settings import Count, Pixels, Settings

# What a later stage draws a run's images with; steps and size are those of the section
# `evaluation`, the sigmas the scheduler's own
DRAWN = ("guidance", "dtype", "attention", "quantize")


class SamplingSettings(Settings):
    """How images are sampled in training: T steps, shift of the sigmas, pixels, guidance scale. DRAWN also hold for every later image of a run."""

    steps: int = Field(ge=2, le=1000, description="T, steps of a rollout")
    shift: float = Field(
        gt=0, le=1000, description="of the sigmas towards noise: 1 is even, the paper's is 3"
    )
    height: Pixels = Field(description="of images, in pixels")
    width: Pixels = Field(description="of images, in pixels")
    guidance: float = Field(
        ge=0,
        le=1000,
        description=(
            "guidance scale: an input of FLUX.1-dev; of Stable Diffusion 3 the scale of "
            "classifier-free guidance, which takes two forward evaluations (none up to 1)"
        ),
    )
    dtype: Literal["float32", "bfloat16"] = Field(
        description="of the transformer's computation; weights stay float32"
    )
    batch_tokens: Count = Field(
        description="image and text tokens in one call of the transformer, or one latent if it has more"
    )
    decode_batch: Count = Field(description="images in one call of the VAE")
    attention: str | None = Field(
        None,
        description=(
            "diffusers' attention backend, of rollouts and updates alike, such as `_native_flash`; "
            "null: PyTorch's choice, but never cuDNN's, whose backward is wrong"
        ),
    )
    quantize: Literal["int8", "nf4"] | None = Field(
        None,
        description=(
            "how the frozen weights of the blocks are kept under a LoRA: in 8 bits or in 4; null: "
            "as `dtype` says"
        ),
    )

    @field_validator("attention")
    @classmethod
    def _is_known(cls, value):
        if value is not None:
            from diffusers.models.attention_dispatch import (
                AttentionBackendName,
            )  # late: it loads torch

            if value not in (known := [backend.value for backend in AttentionBackendName]):
                raise ValueError(f"must be one of {', '.join(known)}, or null")
        return value

    @property
    def size(self) -> dict[str, int]:
        """Return height and width in pixels, by name."""
        return {"height": self.height, "width": self.width}

    @property
    def drawn(self) -> dict[str, Any]:
        """Return what every later stage takes over of these: DRAWN, by name."""
        return {name: getattr(self, name) for name in DRAWN}
