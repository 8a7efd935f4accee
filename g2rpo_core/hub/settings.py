"""What a profile takes from the hub: published models (section `models`) and sets of prompts."""

from typing import Annotated, Literal

from huggingface_hub.utils import HFValidationError, validate_repo_id
from pydantic import AfterValidator, Field, PositiveInt, model_validator

from g2rpo_core.foundation.errors import attempt
from g2rpo_core.foundation.settings import Settings


def _check_repo(repo: str) -> str:
    """Refuse what the hub's client does, here and in one line."""
    if attempt(lambda: validate_repo_id(repo), HFValidationError)[1] or "/" not in repo:
        raise ValueError(
            f"{repo!r} is no repository of the hub (owner/name); weights on your own disk are "
            "`repo: null` and `folder: PATH`"
        )
    return repo


Repo = Annotated[
    str,
    AfterValidator(_check_repo),
    Field(description="Repository on the hub, as owner/name."),
]
Revision = Annotated[
    str | None,
    Field(pattern=r"^[0-9a-f]{40}$", description="A full commit, because branches move."),
]


Variant = Annotated[
    str | None,
    Field(
        pattern=r"^\w+$",
        description=(
            "Read the files with this in their names, such as fp16 or ema; "
            "null: those without any, as diffusers does."
        ),
    ),
]


# A folder is what is in it: the hub's client adds this when it downloads, and says nothing
Pattern = Annotated[
    str, AfterValidator(lambda pattern: f"{pattern}*" if pattern.endswith("/") else pattern)
]


class HubFiles(Settings):
    """Files of a repository.

    Without a revision, the first download looks it up and writes it into the committed lock
    (`download.known_revisions`).
    """

    repo: Repo
    revision: Revision = None
    files: tuple[Pattern, ...] = Field(
        min_length=1, description="Patterns of the files to download."
    )
    sha256: dict[str, str] = Field(
        {}, description="Hash by file, of files whose content must be the known one."
    )


class Weights(HubFiles):
    """Weights in a repository, or in a folder of your own."""

    # A folder may take its place
    repo: Repo | None = Field(  # type: ignore[assignment]
        None, description="Repository on the hub, as owner/name."
    )
    folder: str | None = Field(
        None,
        description=(
            "Where the weights lie on disk, in place of `repo` (then null): a folder, or one file "
            "of published weights."
        ),
    )
    variant: Variant = None

    @model_validator(mode="after")
    def _has_one_place(self):
        if (self.folder is None) == (self.repo is None):
            raise ValueError(
                "needs either `repo` or `folder`"
                + (": set the other one to null" if self.repo else "")
            )
        return self

    @property
    def place(self) -> str:
        """Return the repository or the folder."""
        return self.repo or str(self.folder)


class HubModel(Weights):
    """One published model, or one of your own in a folder in diffusers' layout."""

    architecture: str | None = Field(
        None,
        description=(
            "Architecture in open_clip, for checkpoints that do not say it; of `pipeline`, the "
            "repository whose shape it has, for plans of a model that is not known here."
        ),
    )


class HubStyles(Settings):
    """The styles of prompts, from one list per style."""

    repo: Repo
    revision: Revision = None
    files: dict[str, str] = Field(min_length=1, description="JSON file with its prompts, by style.")


class HubPrompts(HubFiles):
    """Prompts in a data set, in the same formats as files on disk."""

    distinct: PositiveInt | None = Field(
        None, description="How many different texts there must be; null: any number."
    )
    styles: HubStyles | None = Field(None, description="Lists that give each prompt's style.")


class PublishedModel(Weights):
    """Published or exported weights, evaluated with the runs.

    A transformer or a LoRA, on the hub, in a folder or in one file (docs/howto/export.md).
    """

    files: tuple[Pattern, ...] = Field(
        ("*.safetensors", "*.json"),
        description="Patterns of the files to download, or of those in the folder.",
    )
    trained_on: dict[str, float] = Field({}, description="Weight by reward, if known.")
    method: str | None = Field(
        None, description="Method whose row of the paper's table is shown next to it."
    )
    label: str | None = Field(None, description="Name in reports.")


class HubModels(Settings):
    """Published models from the hub: the text-to-image pipeline, and what the rewards need.

    The latter are in `RewardSpec.models`.
    """

    source: Literal["hub"] = Field(description="Download published models.")
    repos: dict[str, HubModel] = Field(
        description="Repository by model: `pipeline`, and those of the rewards."
    )

    @model_validator(mode="after")
    def _has_a_pipeline(self):
        if "pipeline" not in self.repos:
            raise ValueError("repos: needs `pipeline`, the text-to-image model")
        return self
