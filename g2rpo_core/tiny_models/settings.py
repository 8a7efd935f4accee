"""The section `models` of a profile that builds and trains its models here."""

from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from g2rpo_core.foundation.settings import Count, Rate, Seed, Settings
from g2rpo_core.tasks import TaskName

BASES = {  # name -> whose small twin
    "flux": "FluxPipeline",
    "sd3": "StableDiffusion3Pipeline",
    "flux2": "Flux2KleinPipeline",
    "zimage": "ZImagePipeline",
    "qwen_image": "QwenImagePipeline",
}
TOKEN = 8  # pixels: the side of an image token of tiny models
Channels = Annotated[int, Field(gt=0, le=4096, multiple_of=8)]


class FitSettings(Settings):
    """How long a tiny model is trained, and with which learning rates."""

    steps: Count = Field(description="Optimizer steps.")
    batch: Count = Field(description="Examples per step.")
    learning_rate: Rate = Field(description="AdamW's peak learning rate")
    muon_rate: Rate | None = Field(
        0.02,
        description="Muon's, for the matrices of blocks; 0.02 is its published default; "
        "none: AdamW alone",
    )


class TransformerSize(Settings):
    """The transformer of a small FLUX.1."""

    heads: Count = Field(4, description="Attention heads.")
    head_width: Annotated[int, Field(gt=0, le=1024, multiple_of=16)] = Field(
        32, description="Channels per head, divisible by 16."
    )
    blocks: Count = Field(2, description="Blocks with separate weights for text and image.")
    single_blocks: Count = Field(2, description="Blocks with shared weights.")


class VaeSize(Settings):
    """The VAE: three levels, so that a latent is 4 x 4 pixels; 8 latent channels."""

    channels: tuple[Channels, Channels, Channels] = Field(
        (16, 32, 32), description="Channels per level, each a multiple of the first."
    )

    @field_validator("channels")
    @classmethod
    def _are_multiples(cls, value):
        if any(channels % value[0] for channels in value):
            raise ValueError(f"each must be a multiple of the first, {value[0]}")
        return value


class TowerSize(Settings):
    """The image tower of the CLIP scorers: HPS-v2.1, CLIP Score and PickScore."""

    width: Annotated[int, Field(gt=0, le=8192, multiple_of=32)] = Field(
        96, description="Channels, in heads of 32."
    )
    layers: Count = Field(3, description="Transformer blocks.")


class Sizes(Settings):
    """How large the models are that are built; the defaults are those of profile `tiny`."""

    transformer: TransformerSize = TransformerSize()
    vae: VaeSize = VaeSize()
    scorers: TowerSize = TowerSize()


class BuiltModels(Settings):
    """Models built and trained here on the images of a task.

    The base model is the one whose fit is given, such as `flux`: its transformer and text encoders.
    A scorer without a fit is not built.
    """

    source: TaskName = Field(description="Build and train the models here, on this task's images.")
    seed: Seed = Field(description="Seed of the images and of the initial weights.")
    images: Count = Field(
        description="Images of the pipeline's training, and at most as many of a scorer's."
    )
    device: Literal["cpu", "gpu"] = Field(
        "cpu",
        description=(
            "Device that trains the VAE, the base model and the CLIP scorers; "
            "a GPU computes other bits."
        ),
    )
    sizes: Sizes = Field(Sizes(), description="Sizes of the models.")
    vae: FitSettings
    flux: FitSettings | None = Field(None, description="Build a small FLUX.1, trained by this fit.")
    sd3: FitSettings | None = Field(
        None, description="Build a small Stable Diffusion 3.5 instead, trained by this fit."
    )
    flux2: FitSettings | None = Field(
        None, description="Build a small FLUX.2 klein instead, trained by this fit."
    )
    zimage: FitSettings | None = Field(
        None, description="Build a small Z-Image instead, trained by this fit."
    )
    qwen_image: FitSettings | None = Field(
        None, description="Build a small Qwen-Image instead, trained by this fit."
    )
    clip_score: FitSettings | None = None
    hps: FitSettings | None = None
    pickscore: FitSettings | None = None
    image_reward: FitSettings | None = None
    unified_reward: FitSettings | None = None

    @model_validator(mode="after")
    def _has_one_base(self):
        if sum(self.fit_of(name) is not None for name in BASES) != 1:
            raise ValueError(
                "needs the fit of one base model: either "
                f"{' or '.join(f'`{name}`' for name in BASES)}"
            )
        if self.flux is None and self.sizes.transformer != TransformerSize():
            raise ValueError(
                "sizes.transformer: is that of `flux`; the other base models have one size"
            )
        return self

    @property
    def base(self) -> str:
        """Return the name of the base model that is built."""
        return next(name for name in BASES if self.fit_of(name))

    def fit_of(self, model: str) -> FitSettings | None:
        """Return the fit of a scorer or a base model; None if it is not built."""
        return getattr(self, model)
