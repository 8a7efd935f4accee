"""The section `models` of a profile that uses published models."""

from typing import Literal

from pydantic import Field, model_validator

from g2rpo_core.settings import Settings


class HubModel(Settings):
    """One published model. files: patterns of the files to have; sha256: of those whose content must be the known one."""

    repo: str = Field(pattern=r"^[^/\s]+/[^/\s]+$")
    revision: str = Field(pattern=r"^[0-9a-f]{40}$", description="a full commit, as branches move")
    files: tuple[str, ...] = Field(min_length=1)
    sha256: dict[str, str] = {}
    architecture: str | None = Field(None, description="open_clip's name of the architecture, for checkpoints without one")


class HubModels(Settings):
    """Published models from the Hugging Face hub: the text-to-image pipeline, and what the rewards need (`RewardSpec.models`)."""

    source: Literal["hub"]
    repos: dict[str, HubModel]

    @model_validator(mode="after")
    def _has_a_pipeline(self):
        if "pipeline" not in self.repos:
            raise ValueError("repos: needs `pipeline`, the text-to-image model")
        return self
