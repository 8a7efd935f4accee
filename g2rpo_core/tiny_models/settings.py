"""The section `models` of a profile whose models are built and trained here, on images of coloured shapes."""

from typing import Literal

from pydantic import Field

from g2rpo_core.settings import Count, Rate, Seed, Settings


class FitSettings(Settings):
    """How long a tiny model is trained: optimizer steps, examples a step, peak learning rates."""

    steps: Count = Field(description="optimizer steps")
    batch: Count = Field(description="examples in a step")
    learning_rate: Rate = Field(description="AdamW's peak learning rate")
    muon_rate: Rate | None = Field(
        0.02, description="Muon's, for the matrices of blocks; 0.02 is its published default; none: AdamW alone"
    )


class ShapesModels(Settings):
    """Models built and trained here on the shapes task; images: how many the pipeline is trained on."""

    source: Literal["shapes"] = Field(description="build and train the models here")
    seed: Seed = Field(description="of images and weights")
    images: Count
    vae: FitSettings
    flux: FitSettings
    clip_score: FitSettings
    hps: FitSettings
    pickscore: FitSettings
    image_reward: FitSettings
    unified_reward: FitSettings
