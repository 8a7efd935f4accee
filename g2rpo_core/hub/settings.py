"""What of the Hugging Face hub a profile names: its section `models` with published models, and data sets of prompts."""

from typing import Annotated, Literal

from pydantic import Field, PositiveInt, model_validator

from g2rpo_core.settings import Settings

Repo = Annotated[str, Field(pattern=r"^[\w.-]+/[\w.-]+$", description="owner/name on the hub")]
Revision = Annotated[str | None, Field(pattern=r"^[0-9a-f]{40}$", description="a full commit, as branches move")]


class HubFiles(Settings):
    """Files of a repository. files: patterns of the files to have; sha256: of those whose content must be the known one.

    Without a revision the first download looks it up and writes it into the committed lock (`Revisions`).
    """

    repo: Repo
    revision: Revision = None
    files: tuple[str, ...] = Field(min_length=1)
    sha256: dict[str, str] = {}


class HubModel(HubFiles):
    """One published model."""

    architecture: str | None = Field(None, description="open_clip's name of the architecture, for checkpoints without one")


class HubStyles(Settings):
    """The style of prompts: that of the list which has them. files: style -> JSON file with its prompts."""

    repo: Repo
    revision: Revision = None
    files: dict[str, str] = Field(min_length=1)


class HubPrompts(HubFiles):
    """Prompts in a data set: files as a profile may name them on disk. distinct: how many different texts they must have."""

    distinct: PositiveInt | None = None
    styles: HubStyles | None = None


class PublishedModel(Settings):
    """Weights that others published, or that were exported: a diffusers transformer or a LoRA, evaluated beside the runs.

    In a repository of the hub (repo, files), or in a folder. trained_on: name -> weight of the rewards that it was trained on, if
    that is known; method: the method whose numbers in the paper belong beside it; label: in reports.
    """

    folder: str | None = None
    repo: Repo | None = None
    revision: Revision = None
    files: tuple[str, ...] = ("*.safetensors", "config.json")
    sha256: dict[str, str] = {}
    trained_on: dict[str, float] = {}
    method: str | None = None
    label: str | None = None

    @model_validator(mode="after")
    def _has_one_place(self):
        if (self.folder is None) == (self.repo is None):
            raise ValueError("needs either `repo` or `folder`")
        return self


class HubModels(Settings):
    """Published models from the Hugging Face hub: the text-to-image pipeline, and what the rewards need (`RewardSpec.models`)."""

    source: Literal["hub"]
    repos: dict[str, HubModel]

    @model_validator(mode="after")
    def _has_a_pipeline(self):
        if "pipeline" not in self.repos:
            raise ValueError("repos: needs `pipeline`, the text-to-image model")
        return self
