"""The section `sampling` of a profile."""

from typing import Any, Literal

from pydantic import Field, field_validator

from g2rpo_core.foundation.settings import Count, Pixels, Settings

# What every later image of a run is drawn with; steps and size are those of the section
# `evaluation`, the sigmas the scheduler's own
DRAWN = ("guidance", "dtype", "attention", "quantize")


class SamplingSettings(Settings):
    """How images are sampled in training.

    `guidance`, `dtype`, `attention` and `quantize` also hold for every later image of a run.
    """

    steps: int = Field(ge=2, le=1000, description="T, the steps of a rollout.")
    shift: float = Field(
        gt=0, le=1000, description="Shift of the sigmas towards noise; 1 is even, the paper's is 3."
    )
    height: Pixels = Field(description="Size of images in pixels.")
    width: Pixels = Field(description="Size of images in pixels.")
    guidance: float = Field(
        ge=0,
        le=1000,
        description=(
            "Guidance scale: an input of FLUX.1-dev; for Stable Diffusion 3 that of "
            "classifier-free guidance, which takes two forward evaluations (none up to 1)."
        ),
    )
    dtype: Literal["float32", "bfloat16"] = Field(
        description="Dtype of the transformer's computation; weights stay float32."
    )
    batch_tokens: Count = Field(
        description=(
            "Image and text tokens in one call of the transformer; one latent always fits."
        )
    )
    decode_batch: Count = Field(description="Images in one call of the VAE.")
    attention: str | None = Field(
        None,
        description=(
            "Attention backend of diffusers, for rollouts and updates, such as `_native_flash`; "
            "null: PyTorch's choice, but never cuDNN's, whose backward is wrong."
        ),
    )
    quantize: Literal["int8", "nf4"] | None = Field(
        None,
        description=(
            "Keep the frozen weights of the blocks under a LoRA in 8 or 4 bits; "
            "null: as `dtype` says."
        ),
    )

    @field_validator("attention")
    @classmethod
    def _is_known(cls, value):
        if value is not None:
            # Late: it loads torch
            from diffusers.models.attention_dispatch import AttentionBackendName

            if value not in (known := [backend.value for backend in AttentionBackendName]):
                raise ValueError(f"must be one of {', '.join(known)}, or null")
        return value

    @property
    def size(self) -> dict[str, int]:
        """Return height and width in pixels, by name."""
        return {"height": self.height, "width": self.width}

    @property
    def drawn(self) -> dict[str, Any]:
        """Return what every later stage takes over of these settings: DRAWN, by name."""
        return {name: getattr(self, name) for name in DRAWN}
