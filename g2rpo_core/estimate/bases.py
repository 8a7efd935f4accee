"""The shape of a profile's base model: that of a published repository, before anything is downloaded."""

import torch
import transformers

from g2rpo_core.bases.base import Base, Config, Published
from g2rpo_core.bases.table import known_repos, published_shape
from g2rpo_core.config import Profile
from g2rpo_core.errors import UserError

CLIP_TOKENS = 77


def shape_of(profile: Profile) -> tuple[Base, Published]:
    """The base model of a profile and its shape, by the repository of its pipeline, or the one whose `architecture` it has.

    UserError for a profile that builds its own small models, and for a repository of unknown shape.
    """
    if profile.models.source != "hub":
        raise UserError(
            "the profile builds its own small models, which fit on any machine: choose one that downloads published ones"
        )
    pipeline = profile.models.repos["pipeline"]
    repo = pipeline.architecture or pipeline.repo
    if found := published_shape(repo):
        return found
    raise UserError(
        f"models.repos.pipeline: the shape of {repo} is not known before its download: name the published model that it was made from"
        f" as `architecture`, one of {', '.join(known_repos())}"
    )


def encoding_shapes(base: Base, shape: Published, max_length: int) -> dict[str, tuple[int, ...]]:
    """The shape of each tensor of an encoded prompt."""
    return base.encoding_shapes(shape.transformer, max_length, CLIP_TOKENS)


def encoder_of(name: str, config: Config) -> torch.nn.Module:
    """A text encoder of a class of transformers, with random weights."""
    kind = getattr(transformers, name)
    return kind(kind.config_class(**config))
