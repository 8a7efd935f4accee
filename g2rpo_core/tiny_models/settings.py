"""Define the section `models` of a profile whose models are built and trained here, on a task's images."""

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

    steps: Count = Field(description="optimizer steps")
    batch: Count = Field(description="examples in a step")
    learning_rate: Rate = Field(description="AdamW's peak learning rate")
    muon_rate: Rate | None = Field(
        0.02,
        description="Muon's, for the matrices of blocks; 0.02 is its published default; none: AdamW alone",
    )


class TransformerSize(Settings):
    """The transformer of a small FLUX.1."""

    heads: Count = Field(4, description="attention heads")
    head_width: Annotated[int, Field(gt=0, le=1024, multiple_of=16)] = Field(
        32, description="channels of a head, divisible by 16"
    )
    blocks: Count = Field(2, description="blocks in which text and image have weights of their own")
    single_blocks: Count = Field(2, description="blocks in which they share weights")


class VaeSize(Settings):
    """The VAE: three levels, so that a latent is 4 x 4 pixels; 8 latent channels."""

    channels: tuple[Channels, Channels, Channels] = Field(
        (16, 32, 32), description="of its levels, each a multiple of the first"
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
        96, description="channels, in heads of 32"
    )
    layers: Count = Field(3, description="transformer blocks")


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

    source: TaskName = Field(description="build and train the models here, on this task's images")
    seed: Seed = Field(description="of images and weights")
    images: Count = Field(description="how many the pipeline is trained on")
    device: Literal["cpu", "gpu"] = Field(
        "cpu",
        description="where VAE, base model and CLIP scorers are trained; a GPU computes other bits",
    )
    sizes: Sizes = Field(Sizes(), description="how large they are")
    vae: FitSettings
    flux: FitSettings | None = Field(None, description="build a small FLUX.1, and fit it so")
    sd3: FitSettings | None = Field(
        None, description="build a small Stable Diffusion 3.5 instead, and fit it so"
    )
    flux2: FitSettings | None = Field(
        None, description="build a small FLUX.2 klein instead, and fit it so"
    )
    zimage: FitSettings | None = Field(
        None, description="build a small Z-Image instead, and fit it so"
    )
    qwen_image: FitSettings | None = Field(
        None, description="build a small Qwen-Image instead, and fit it so"
    )
    clip_score: FitSettings | None = None
    hps: FitSettings | None = None
    pickscore: FitSettings | None = None
    image_reward: FitSettings | None = None
    unified_reward: FitSettings | None = None
    hpsv3: FitSettings | None = None

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
