"""The section `sampling` of a profile."""

from typing import Literal

from pydantic import Field, PositiveFloat, PositiveInt

from g2rpo_core.settings import Settings


class SamplingSettings(Settings):
    """How images are sampled in training: T steps, shift of the sigmas, pixels, FLUX's guidance scale."""

    steps: int = Field(ge=2)
    shift: PositiveFloat
    height: PositiveInt
    width: PositiveInt
    guidance: float = Field(ge=0)
    dtype: Literal["float32", "bfloat16"] = Field(description="of the transformer's computation; weights stay float32")
    batch_tokens: PositiveInt = Field(
        description="image and text tokens in one call of the transformer, if one latent has no more"
    )
    decode_batch: PositiveInt = Field(description="images in one call of the VAE")
