"""Trace a profile's base model: shape, parameters and decoder, without downloads or allocation."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
from torch._subclasses.fake_tensor import FakeTensorMode

from g2rpo_core.architectures.architecture import Architecture, Config, ModelShape
from g2rpo_core.architectures.table import (
    ARCHITECTURES,
    check_trainable,
    known_repos,
    known_shape,
    read_shape,
)
from g2rpo_core.config import Profile
from g2rpo_core.foundation.errors import UserError
from g2rpo_core.models.cost import Cost, Measured, make_transformer
from g2rpo_core.models.kept import CODE, kept
from g2rpo_core.models.loading import describe_trained
from g2rpo_core.models.quantized import frozen_layers
from g2rpo_core.models.settings import LoraSettings
from g2rpo_core.tiny_models.pipeline import flux_config, vae_config
from g2rpo_core.tiny_models.settings import BASES

CLIP_TOKENS = 77
TRACED_BY = (*CODE, "estimate")


def shape_of(profile: Profile) -> tuple[Architecture, ModelShape]:
    """Return a profile's base model and shape, by its pipeline's repository or folder.

    A repository may have the shape of another's `architecture`. A small FLUX.1 that is built is
    planned without its text encoders. UserError for other small models and for those that compute
    in float32, and for a repository of unknown shape or one that is not to be trained.
    """
    if profile.models.source != "hub":
        if profile.models.base != "flux" or profile.sampling.dtype == "float32":
            raise UserError(
                "the profile builds its own small models, for a CPU: "
                "choose one that downloads published ones, or small_gpu"
            )
        sizes = profile.models.sizes
        # Its fit sets the shift factor, as all such numbers
        vae = {**vae_config(sizes.vae), "shift_factor": 0.0}
        return ARCHITECTURES[BASES["flux"]], ModelShape(
            flux_config(sizes.transformer), vae, {}, {"shift": profile.sampling.shift}
        )
    pipeline = profile.models.repos["pipeline"]
    repo = pipeline.architecture or pipeline.repo
    if repo is None:
        folder = Path(pipeline.place)
        if not (folder / "model_index.json").exists():
            raise UserError(
                f"models.repos.pipeline.folder: {folder} is no model in diffusers' layout "
                "(it has no model_index.json)"
            )
        return read_shape(folder)
    check_trainable(repo)
    if shape := known_shape(repo):
        return shape
    raise UserError(
        f"models.repos.pipeline: the shape of {repo} is not known before its download: "
        "name the published model that it was made from"
        f" as `architecture`, one of {', '.join(known_repos())}"
    )


def encoding_shapes(
    architecture: Architecture, shape: ModelShape, max_length: int
) -> dict[str, tuple[int, ...]]:
    """Return the shape of each tensor of an encoded prompt."""
    return architecture.encoding_shapes(shape.transformer, max_length, CLIP_TOKENS)


def make_encoder(name: str, config: Config) -> torch.nn.Module:
    """Build a text encoder of a class of transformers, with random weights."""
    kind = getattr(transformers, name)
    return kind(kind.config_class(**config))


@dataclass(frozen=True)
class Parameters:
    """Numbers of parameters of a transformer."""

    all: int
    trained: int
    """Those with a gradient."""
    block: int
    """Of the largest block; sharding gathers one at a time."""
    rest: int
    """Outside blocks."""
    buffers: int = 0
    """Numbers in float32 on every GPU, such as a table of positions."""
    linear: int = 0
    """Frozen weights of linear layers in blocks, which `sampling.quantize` keeps in fewer bits."""
    largest: int = 0
    """Those of the largest such layer; a call restores one layer at a time."""
    trains: str = ""
    """Which modules train, in words (`describe_trained`)."""


def _count(module: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def count_kept(kind: str, config: Config, make: Callable[[], torch.nn.Module]) -> int:
    """Count the parameters of what `make` builds, kept by its class and configuration."""
    return kept(kind, config, lambda: {"parameters": count_parameters(make)}, TRACED_BY)[
        "parameters"
    ]


def count_parameters(make: Callable[[], torch.nn.Module]) -> int:
    """Count the parameters of the model that `make` builds, without memory for them."""
    with torch.device("meta"):
        return _count(make())


def transformer_parameters(
    architecture: Architecture, config: Config, lora: LoraSettings | None
) -> Parameters:
    """Count the parameters of a base model's transformer, with the LoRA's if there is one."""
    return Parameters(
        **kept(
            "transformer",
            (architecture.label, config, lora),
            lambda: asdict(_transformer_parameters(architecture, config, lora)),
            TRACED_BY,
        )
    )


def _transformer_parameters(
    architecture: Architecture, config: Config, lora: LoraSettings | None
) -> Parameters:
    with torch.device("meta"):
        transformer = make_transformer(architecture, config, lora)
    trained = {
        name: parameter.numel()
        for name, parameter in transformer.named_parameters()
        if parameter.requires_grad
    }
    blocks = [_count(block) for block in architecture.blocks(transformer)]
    buffers = sum(buffer.numel() for buffer in transformer.buffers())
    linear = [
        layer.weight.numel() for _, _, layer in frozen_layers(architecture.blocks(transformer))
    ]
    rest = _count(transformer) - sum(blocks)
    return Parameters(
        _count(transformer),
        sum(trained.values()),
        max(blocks),
        rest,
        buffers,
        sum(linear),
        max(linear, default=0),
        describe_trained(trained),
    )


@cache
def vae_cost(
    architecture: Architecture,
    config: tuple[tuple[str, Any], ...],
    batch: int,
    height: int,
    width: int,
) -> Cost:
    """Return the cost of decoding a batch of images in float32, in pixels of height x width.

    config: items of the VAE's configuration.
    """
    decides = (config, batch, height, width)
    return Cost(
        **kept(
            f"decoder of {architecture.label}",
            decides,
            lambda: asdict(_vae_cost(architecture, *decides)),
            TRACED_BY,
        )
    )


def _vae_cost(
    architecture: Architecture,
    config: tuple[tuple[str, Any], ...],
    batch: int,
    height: int,
    width: int,
) -> Cost:
    shape = dict(config)
    factor = architecture.vae_factor(shape)
    with FakeTensorMode(), torch.no_grad():
        vae = architecture.vae(**shape)
        latents = torch.zeros(
            batch, *architecture.latent_shape(shape, height // factor, width // factor)
        )
        with Measured() as measured:
            architecture.decode(vae, latents)
    return Cost(measured.peak, measured.flops)
