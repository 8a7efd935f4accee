"""What a base model is to the rest of the code: everything that depends on its classes, in one value."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isqrt
from pathlib import Path
from typing import Any

import torch
from diffusers import DiffusionPipeline
from diffusers.models.modeling_utils import ModelMixin

from g2rpo_core.bases.schedule import Schedule

Tensors = Mapping[str, torch.Tensor]
Config = Mapping[str, Any]  # of a model, as in its config.json


@dataclass(frozen=True)
class Published:
    """The shape of published weights, for plans and rehearsals: what the configurations in a repository say.

    encoders: text encoder -> its class in transformers, and its configuration; scheduler: what differs from diffusers' defaults.
    """

    transformer: Config
    vae: Config
    encoders: Mapping[str, tuple[str, Config]]
    scheduler: Config


class Base(ABC):
    """A base model, by diffusers' own classes.

    Latents are in the shape that the transformer takes, [N, ...]; a prompt's encoding is a few tensors with names.
    """

    label: str  # how texts call it
    tag: str  # of model cards on the hub
    licences: Mapping[str, Mapping[str, str]]  # start of a repository's name -> the hub's metadata for its licence
    pipeline: type[DiffusionPipeline]
    transformer: type[ModelMixin]
    tokenizers: Mapping[str, str]  # part of the pipeline -> kind, clip or t5; the last one is the `long_tokenizer`
    text_encoders: tuple[str, ...]  # parts of the pipeline
    encoding: tuple[str, ...]  # the names of the tensors of an encoded prompt
    lora_targets: tuple[str, ...]  # ends of the names of modules that an adapter takes if the profile names none
    published: Mapping[str, Published]  # repository -> shape
    forms: tuple[str, ...] = ("diffusers", "lora")  # in which trained weights can be exported
    has_negative = False  # whether the velocity without a prompt is asked for, too, so that the empty prompt is encoded
    alpha_in_lora = True  # whether loaders of an exported LoRA find its alpha in the file; otherwise it is in the weights

    @abstractmethod
    def encode(self, pipeline: DiffusionPipeline, texts: Sequence[str], max_length: int) -> dict[str, torch.Tensor]:
        """The encodings of P texts by the pipeline's own encode_prompt: name -> [P, ...]."""

    @abstractmethod
    def encoding_shapes(self, transformer: Config, max_length: int, clip_length: int) -> dict[str, tuple[int, ...]]:
        """The shape of each tensor of an encoded prompt, without encoding one."""

    @property
    def long_tokenizer(self) -> str:
        """The tokenizer, a part of the pipeline, whose length `embed.max_sequence_length` limits."""
        return list(self.tokenizers)[-1]

    def tokenizer(self, pipeline: DiffusionPipeline) -> Any:
        """That part of a pipeline."""
        return getattr(pipeline, self.long_tokenizer)

    def text_tokens(self, encoded: Tensors) -> int:
        """The text tokens among which a call of the transformer attends; encoded: name -> [P, ...]."""
        return encoded["context"].shape[1]

    def pack(self, latents: torch.Tensor) -> torch.Tensor:
        """Latents of the VAE [N, channels, rows, columns] as the transformer takes them."""
        return latents

    def unpack(self, latents: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
        """The inverse of `pack`, for latents of rows x columns."""
        return latents

    def longest_side(self, transformer: Config) -> int | None:
        """How many rows or columns latents may have; None: any number."""
        return None

    def schedule(self, config: Config, image_tokens: int) -> Schedule:
        """The sigmas with which the pipeline itself samples images of that many tokens; config: its scheduler's."""
        return Schedule.published(config, image_tokens)

    def forward_evals(self, guidance: float) -> int:
        """Forward evaluations (NFE) that the velocity of one latent takes."""
        return 1

    def positions(self, rows: int, columns: int, device: torch.device) -> dict[str, torch.Tensor]:
        """Arguments of the transformer that depend only on the size of the latents."""
        return {}

    @abstractmethod
    def velocity(
        self,
        transformer: ModelMixin,
        latents: torch.Tensor,
        sigma: torch.Tensor,
        encoded: Tensors,
        guidance: float,
        positions: Tensors,
    ) -> torch.Tensor:
        """One call of the transformer: latents [N, ...] at sigma [N], each with its prompt's encoding [N, ...].

        Sigma reaches the model in float32, and as it is. guidance: used only where it is an input of the model.
        """

    def read_lora(self, folder: Path, file: str) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """A LoRA's weights under diffusers' names, and further arguments of `pipeline.load_lora_into_transformer`."""
        how = {"weight_name": file, "return_lora_metadata": True, "local_files_only": True}
        weights, metadata = self.pipeline.lora_state_dict(folder, **how)
        return weights, {"metadata": metadata}

    def guided(self, without: torch.Tensor, with_prompt: torch.Tensor, guidance: float) -> torch.Tensor:
        """The velocity of classifier-free guidance, from those without and with the prompt; only where `forward_evals` is two."""
        return without + guidance * (with_prompt - without)

    def blocks(self, transformer: ModelMixin) -> list[torch.nn.Module]:
        """The blocks that are compiled and sharded one by one, in the order of the computation."""
        return list(transformer.transformer_blocks)

    @abstractmethod
    def inputs(self, config: Config, batch: int, image_tokens: int, text_tokens: int, device: str) -> dict[str, Any]:
        """Arguments of a call of the transformer: `batch` latents with a prompt each, all zeros."""

    @abstractmethod
    def shallow(self, config: Config) -> tuple[dict[str, Any], list[tuple[dict[str, Any], int]]]:
        """Small configurations that tell the cost of the whole model, which grows by the same amount with each block of a kind.

        A shallow one, and for every kind of block one with a block more, and how many more the whole model has than the shallow.
        """

    def original(self, weights: Tensors, config: Config) -> dict[str, torch.Tensor]:
        """The transformer's weights under the names of its first publisher, for the form `original`."""
        raise NotImplementedError

    def kohya(self, lora: Tensors, shapes: Mapping[str, torch.Size], alpha: float, config: Config) -> dict[str, torch.Tensor]:
        """A LoRA under the names of kohya's sd-scripts, for the form `kohya`."""
        raise NotImplementedError


def sides(tokens: int) -> tuple[int, int]:
    """Rows and columns of a grid of that many tokens, as near to a square as there is."""
    rows = next(one for one in range(isqrt(tokens), 0, -1) if tokens % one == 0)
    return rows, tokens // rows
