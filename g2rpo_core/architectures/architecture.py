"""The interface of a base model, `Architecture`, and the sigmas with which it samples."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import exp, isqrt
from typing import Any

import torch
from diffusers import AutoencoderKL, DiffusionPipeline
from diffusers.models.modeling_utils import ModelMixin
from diffusers.pipelines.flux.pipeline_flux import calculate_shift
from transformers import BatchEncoding, PreTrainedTokenizerBase

from g2rpo_core.architectures.original import Config, Original, Tensors, original
from g2rpo_core.sampling.schedule import even_sigmas

MASK = "mask"  # [P, S] of an encoding: 1 for a token, and 0 for the padding behind the last
# Ends of the names of a joint attention's matrices, those of diffusers' recipe for LoRA
JOINT_ATTENTION = (
    "to_q",
    "to_k",
    "to_v",
    "to_out.0",
    "add_q_proj",
    "add_k_proj",
    "add_v_proj",
    "to_add_out",
)
Arguments = dict[str, Any]  # of a transformer's forward, by name


@dataclass(frozen=True)
class Schedule:
    """Sigmas shifted towards noise.

    Diffusion pipelines that leave the sigmas to the scheduler (Stable Diffusion 3) space T of them
    evenly down to its smallest, and come from there to 0 in a last, tiny step.
    """

    shift: float | Callable[[int], float]
    """Or, where it depends on the number of steps, what returns it."""
    last: float | None = None
    """The last sigma before 0, before it is shifted; None: one step's width, as FLUX has it."""
    terminal: float | None = None
    """The last sigma before 0, to which the shifted ones are stretched; None: they are not."""

    def shift_at(self, steps: int) -> float:
        """Return the shift for that many steps."""
        return self.shift(steps) if callable(self.shift) else self.shift

    def sigmas(self, steps: int) -> list[float]:
        """Return T + 1 sigmas, falling from 1 to 0."""
        shift = self.shift_at(steps)
        if self.last is None:
            sigmas = even_sigmas(steps, shift)[:-1]
        else:
            even = [1 - (1 - self.last) * step / max(steps - 1, 1) for step in range(steps)]
            sigmas = [shift * u / (1 + (shift - 1) * u) for u in even]
        if self.terminal and steps > 1:
            sigmas = [1 - (1 - sigma) * (1 - self.terminal) / (1 - sigmas[-1]) for sigma in sigmas]
        return [*sigmas, 0.0]

    @classmethod
    def published(cls, config: Config, image_tokens: int) -> "Schedule":
        """Make the schedule of a FlowMatchEulerDiscreteScheduler's configuration.

        The shift is the scheduler's own or, if it depends on the resolution, exp(mu): 3.158 for
        FLUX.1-dev at 1024².
        """
        terminal = config.get("shift_terminal")
        if not config["use_dynamic_shifting"]:
            return cls(config["shift"], terminal=terminal)
        lengths = (config["base_image_seq_len"], config["max_image_seq_len"])
        return cls(
            exp(calculate_shift(image_tokens, *lengths, config["base_shift"], config["max_shift"])),
            terminal=terminal,
        )


# Parts that published base models share: config.json of text encoders and VAEs
CLIP_L: Config = {  # openai/clip-vit-large-patch14's text encoder
    "vocab_size": 49408,
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "projection_dim": 768,
    "max_position_embeddings": 77,
}
CLIP_G: Config = {  # laion/CLIP-ViT-bigG-14-laion2B-39B-b160k's
    "vocab_size": 49408,
    "hidden_size": 1280,
    "intermediate_size": 5120,
    "num_hidden_layers": 32,
    "num_attention_heads": 20,
    "projection_dim": 1280,
    "max_position_embeddings": 77,
    "hidden_act": "gelu",
}
T5_XXL: Config = {  # the encoder of google/t5-v1_1-xxl
    "vocab_size": 32128,
    "d_model": 4096,
    "d_ff": 10240,
    "d_kv": 64,
    "num_layers": 24,
    "num_heads": 64,
    "feed_forward_proj": "gated-gelu",
}
QWEN3_4B: Config = {  # Qwen/Qwen3-4B
    "vocab_size": 151936,
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000},
}
# 16 channels at an eighth of the image's size; the latents' mean and deviation differ by model
VAE_16: Config = {
    "block_out_channels": (128, 256, 512, 512),
    "layers_per_block": 2,
    "latent_channels": 16,
    "norm_num_groups": 32,
    "down_block_types": ("DownEncoderBlock2D",) * 4,
    "up_block_types": ("UpDecoderBlock2D",) * 4,
    "use_quant_conv": False,
    "use_post_quant_conv": False,
}


@dataclass(frozen=True)
class ModelShape:
    """The configurations in a published repository, for plans and rehearsals without weights."""

    transformer: Config
    vae: Config
    encoders: Mapping[str, tuple[str, Config]]
    """Text encoder -> its class in transformers, and its configuration."""
    scheduler: Config
    """What differs from diffusers' defaults."""


@dataclass(frozen=True)
class Counter:
    """A tokenizer that gets texts as the model does, to count their tokens."""

    tokenizer: PreTrainedTokenizerBase
    wrapped: Callable[[PreTrainedTokenizerBase, str], str]

    @property
    def model_max_length(self) -> int:
        """Return how many tokens the text encoder was trained with."""
        return self.tokenizer.model_max_length

    def __call__(self, texts: Sequence[str], **options: object) -> BatchEncoding:
        return self.tokenizer([self.wrapped(self.tokenizer, text) for text in texts], **options)


class Architecture(ABC):
    """A base model with diffusers' own classes.

    Latents have the shape that the transformer takes, [N, ...]; a prompt's encoding is a few named
    tensors.
    """

    label: str
    """The name in texts."""
    tag: str
    """The tag of model cards on the hub."""
    licences: Mapping[str, Mapping[str, str]]
    """Start of a repository's name -> the hub's metadata for its licence."""
    pipeline: type[DiffusionPipeline]
    transformer: type[ModelMixin]
    vae: type[ModelMixin] = AutoencoderKL
    tokenizers: Mapping[str, str]
    """Part of the pipeline -> kind, clip, t5 or qwen; the last one is the `long_tokenizer`."""
    text_encoders: tuple[str, ...]
    """Parts of the pipeline."""
    encoding: tuple[str, ...]
    """The names of the tensors of an encoded prompt."""
    padded: tuple[str, ...] = ()
    """Those of `encoding` [P, S, ...] that are padded to one length, MASK among them.

    () where the model attends to its padding.
    """
    depths: tuple[str, ...] = ("num_layers", "num_single_layers")
    """Keys of the configuration with the number of blocks of a kind."""
    lora_targets: tuple[str, ...]
    """Ends of the names of modules that an adapter takes if the profile names none."""
    published: Mapping[str, ModelShape]
    """Repository -> shape."""
    forms: tuple[str, ...] = ("diffusers", "lora", "peft")
    """Forms in which trained weights can be exported."""
    other_names_stay = False
    """Whether a weight that `original_modules` does not name has the same name there."""
    unused: tuple[str, ...] = ()
    """Weights of the first publisher's files that its own code does not use."""
    has_negative = False
    """Whether the velocity without a prompt is needed, too, so that `negative` is encoded."""
    negative = ""
    """The text that stands for no prompt."""
    noise_dtype: torch.dtype | None = None
    """In which the pipeline draws its noise; None: in the dtype of its weights."""
    distilled: Mapping[str, str] = {}
    """Repository that generates and is not trained -> the one to train."""

    @abstractmethod
    def encode(
        self, pipeline: DiffusionPipeline, texts: Sequence[str], max_length: int
    ) -> dict[str, torch.Tensor]:
        """Encode P texts by the pipeline's own encode_prompt: name -> [P, ...]."""

    @abstractmethod
    def encoding_shapes(
        self, transformer: Config, max_length: int, clip_length: int
    ) -> dict[str, tuple[int, ...]]:
        """Return the shape of each tensor of an encoded prompt, without encoding one."""

    @property
    def long_tokenizer(self) -> str:
        """Return the tokenizer (a part's name) that `embed.max_sequence_length` limits."""
        return list(self.tokenizers)[-1]

    def tokenizer(self, pipeline: DiffusionPipeline) -> "Counter":
        """Return the `counter` of a pipeline's `long_tokenizer`."""
        return self.counter(getattr(pipeline, self.long_tokenizer))

    def counter(self, tokenizer: PreTrainedTokenizerBase) -> "Counter":
        """Return a counter of tokens of the `long_tokenizer`, for texts as the model gets them."""
        return Counter(tokenizer, self.wrapped)

    def wrapped(self, tokenizer: PreTrainedTokenizerBase, text: str) -> str:
        """Return a text as the `long_tokenizer` gets it, in the model's chat template if any."""
        return text

    def text_tokens(self, encoded: Tensors) -> int:
        """Return the number of text tokens that the transformer attends to; encoded: [P, ...]."""
        return encoded["context"].shape[1]

    def lengths(self, encoded: Tensors) -> list[int]:
        """Return each of P texts' tokens up to the last that is not padding; encoded: with MASK."""
        mask = encoded[MASK] != 0
        return (mask * torch.arange(1, mask.shape[1] + 1, device=mask.device)).amax(1).tolist()

    def cut(self, encoded: Tensors, length: int) -> dict[str, torch.Tensor]:
        """Leave out what is padding in all texts of an encoding; length: of the longest."""
        return {
            name: tensor[:, :length] if name in self.padded else tensor
            for name, tensor in encoded.items()
        }

    def pack(self, latents: torch.Tensor) -> torch.Tensor:
        """Bring the VAE's latents [N, channels, rows, columns] into the transformer's shape."""
        return latents

    def unpack(self, latents: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
        """Invert `pack`, for latents of rows x columns."""
        return latents

    def vae_factor(self, vae: Config) -> int:
        """Return how many pixels a row or column of the VAE's latents stands for."""
        return 2 ** (len(vae["block_out_channels"]) - 1)

    def latent_shape(self, vae: Config, rows: int, columns: int) -> tuple[int, ...]:
        """Return the shape of the noise that the pipeline draws, before packing.

        rows, columns: of the VAE's latents.
        """
        return vae["latent_channels"], rows, columns

    def decode(self, vae: ModelMixin, latents: torch.Tensor) -> torch.Tensor:
        """Decode unpacked latents [N, ...] to images [N, 3, height, width], about [-1, 1]."""
        return vae.decode(
            latents / vae.config.scaling_factor + vae.config.shift_factor, return_dict=False
        )[0]

    def longest_side(self, transformer: Config) -> int | None:
        """Return how many rows or columns latents may have; None: any number."""
        return None

    def schedule(self, config: Config, image_tokens: int) -> Schedule:
        """Return the pipeline's own sigmas at that many image tokens; config: its scheduler's."""
        return Schedule.published(config, image_tokens)

    def forward_evals(self, guidance: float) -> int:
        """Return the forward evaluations (NFE) that the velocity of one latent takes."""
        return 1

    def pipeline_guidance(self, guidance: float) -> Arguments:
        """Return the arguments of the pipeline's call that mean this guidance."""
        return {"guidance_scale": guidance}

    def complete(self, transformer: ModelMixin) -> None:
        """Compute what a model made on the meta device lacks besides parameters and buffers."""
        return

    def idle(self, transformer: Config) -> tuple[str, ...]:
        """Return name prefixes of weights that the velocity does not use: they get no gradient."""
        return ()

    def positions(self, rows: int, columns: int, device: torch.device) -> Arguments:
        """Return arguments of the transformer that depend only on the size of the latents."""
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
        """Call the transformer once on latents [N, ...] at sigma [N] with encodings [N, ...].

        encoded: without MASK where no text has padding. Sigma reaches the model in float32 and
        unscaled. guidance: used only by models that take it as an input.
        """

    def guided(
        self, without: torch.Tensor, with_prompt: torch.Tensor, guidance: float
    ) -> torch.Tensor:
        """Apply classifier-free guidance; called only where `forward_evals` is two."""
        return without + guidance * (with_prompt - without)

    def blocks(self, transformer: ModelMixin) -> list[torch.nn.Module]:
        """Return the blocks to compile and shard one by one, in the order of computation."""
        return list(transformer.transformer_blocks)

    @abstractmethod
    def inputs(
        self, config: Config, batch: int, image_tokens: int, text_tokens: int, device: str
    ) -> Arguments:
        """Make the transformer's arguments for `batch` latents with a prompt each, all zeros."""

    def shallow(self, config: Config) -> tuple[Config, list[tuple[Config, int]]]:
        """Return a shallow configuration, and how the whole model grows from it.

        For every kind of block: the configuration with one block more, and the number of blocks
        that the shallow one lacks. The cost is linear in the number of blocks of a kind.
        """
        shallow = {**config, **dict.fromkeys(self.depths, 1)}
        return shallow, [(shallow | {kind: 2}, config[kind] - 1) for kind in self.depths]

    def original_modules(self, config: Config) -> Iterator[Original]:
        """Yield the modules that the first publisher named differently, with diffusers' parts."""
        return iter(())

    def original(self, weights: Tensors, config: Config) -> dict[str, torch.Tensor]:
        """Rename weights as the first publisher does; ValueError for one without such a name."""
        renamed, left = original(weights, self.original_modules(config))
        if left and not self.other_names_stay:
            raise ValueError(f"{min(left)} has no name in the original layout")
        return renamed | {name: weights[name] for name in left}


def chat(tokenizer: PreTrainedTokenizerBase, text: str, thinking: bool) -> str:
    """Put a text into a tokenizer's chat template as the user's turn, ready for the answer.

    thinking: whether the answer may begin with reasoning.
    """
    return tokenizer.apply_chat_template(
        [{"role": "user", "content": text}],
        tokenize=False,
        add_generation_prompt=True,
        enable_thinking=thinking,
    )


def read(
    pipeline: DiffusionPipeline, texts: Sequence[str], length: int, layer: int, dropped: int = 0
) -> dict[str, torch.Tensor]:
    """Encode texts by a layer of a language model.

    Returns `context` [P, length, D], zero at padding, and its `mask` [P, length]. dropped: tokens
    of a template before every text, whose states are left out.
    """
    tokens = pipeline.tokenizer(
        list(texts),
        padding="max_length",
        max_length=dropped + length,
        truncation=True,
        return_tensors="pt",
    ).to(pipeline.text_encoder.device)
    states = pipeline.text_encoder(**tokens, output_hidden_states=True).hidden_states[layer][
        :, dropped:
    ]
    mask = tokens.attention_mask[:, dropped:].to(states.dtype)
    return {"context": states * mask[..., None], "mask": mask}


def sides(tokens: int) -> tuple[int, int]:
    """Return rows and columns of a grid of that many tokens, as near to a square as possible."""
    rows = next(rows for rows in range(isqrt(tokens), 0, -1) if tokens % rows == 0)
    return rows, tokens // rows
