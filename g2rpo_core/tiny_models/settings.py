"""Define the section `models` of a profile whose models are built and trained here, on a task's images."""

from pydantic import Field, model_validator

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


class FitSettings(Settings):
    """How long a tiny model is trained, and with which learning rates."""

    steps: Count = Field(description="optimizer steps")
    batch: Count = Field(description="examples in a step")
    learning_rate: Rate = Field(description="AdamW's peak learning rate")
    muon_rate: Rate | None = Field(
        0.02, description="Muon's, for the matrices of blocks; 0.02 is its published default; none: AdamW alone"
    )


class BuiltModels(Settings):
    """Models built and trained here on the images of a task.

    The base model is the one whose fit is given, such as `flux`: its transformer and text encoders. A scorer without a fit is not built.
    """

    source: TaskName = Field(description="build and train the models here, on this task's images")
    seed: Seed = Field(description="of images and weights")
    images: Count = Field(description="how many the pipeline is trained on")
    vae: FitSettings
    flux: FitSettings | None = Field(None, description="build a small FLUX.1, and fit it so")
    sd3: FitSettings | None = Field(None, description="build a small Stable Diffusion 3.5 instead, and fit it so")
    flux2: FitSettings | None = Field(None, description="build a small FLUX.2 klein instead, and fit it so")
    zimage: FitSettings | None = Field(None, description="build a small Z-Image instead, and fit it so")
    qwen_image: FitSettings | None = Field(None, description="build a small Qwen-Image instead, and fit it so")
    clip_score: FitSettings | None = None
    hps: FitSettings | None = None
    pickscore: FitSettings | None = None
    image_reward: FitSettings | None = None
    unified_reward: FitSettings | None = None
    hpsv3: FitSettings | None = None

    @model_validator(mode="after")
    def _has_one_base(self):
        if sum(self.fit_of(name) is not None for name in BASES) != 1:
            raise ValueError(f"needs the fit of one base model: either {' or '.join(f'`{name}`' for name in BASES)}")
        return self

    @property
    def base(self) -> str:
        """Return the name of the base model that is built."""
        return next(name for name in BASES if self.fit_of(name))

    def fit_of(self, model: str) -> FitSettings | None:
        """Return the fit of a scorer or a base model; None if it is not built."""
        return getattr(self, model)
