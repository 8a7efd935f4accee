"""Make small base models that encode prompts with a language model.

The language model's weights are random and stay so: those of published models are frozen, too.
"""

from abc import abstractmethod
from collections.abc import Callable

import torch
from diffusers import (
    AutoencoderKLFlux2,
    AutoencoderKLQwenImage,
    Flux2KleinPipeline,
    Flux2Transformer2DModel,
    QwenImageTransformer2DModel,
    ZImageTransformer2DModel,
)
from diffusers.models.modeling_utils import ModelMixin
from transformers import (
    PreTrainedModel,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3Model,
)

from g2rpo_core.architectures.architecture import Architecture
from g2rpo_core.architectures.table import ARCHITECTURES
from g2rpo_core.tasks.task import Task
from g2rpo_core.tiny_models.pipeline import (
    DROPPED,
    TinyBase,
    TinyVae,
    initialize,
    quieted,
    vae_config,
)
from g2rpo_core.tiny_models.settings import TOKEN
from g2rpo_core.tiny_models.tokenizers import QWEN_LENGTH, qwen_tokenizer

WIDTH = 32  # of language models


class WithLanguageModel(TinyBase):
    """A tiny base model whose `Architecture` encodes its prompts and calls its transformer."""

    pipeline_class: str
    """Diffusers' class."""
    encoder: PreTrainedModel

    @property
    def architecture(self) -> Architecture:
        """Return the base model."""
        return ARCHITECTURES[self.pipeline_class]

    def __init__(self, task: Task, captions: list[str]):
        self.tokenizer = qwen_tokenizer(task)
        self.encoder = self.make_encoder(len(self.tokenizer)).eval().requires_grad_(False)
        # So that what a token is outweighs its context
        torch.nn.init.normal_(self.encoder.get_input_embeddings().weight)
        transformer = self.make_transformer(task)
        initialize(transformer)
        self.parts = torch.nn.ModuleDict({"transformer": transformer})
        # Encode every text once
        texts = list(dict.fromkeys([self.architecture.negative, *captions]))
        encoders, parts = self.pipeline({"transformer": None}, vae=None, scheduler=None), []
        with torch.no_grad():
            for start in range(0, len(texts), 256):
                parts.append(
                    self.architecture.encode(encoders, texts[start : start + 256], QWEN_LENGTH)
                )
        self.encoded = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
        self.rows = torch.tensor([texts.index(text) for text in captions])
        self.scheduler = next(iter(self.architecture.published.values())).scheduler
        side = 2 * task.size // TOKEN
        self.positions = self.architecture.positions(side, side, torch.device("cpu"))

    @abstractmethod
    def make_encoder(self, vocabulary: int) -> PreTrainedModel:
        """Make the text encoder."""

    @abstractmethod
    def make_transformer(self, task: Task) -> ModelMixin:
        """Make the transformer."""

    def pack(self, latents: torch.Tensor) -> torch.Tensor:
        return self.architecture.pack(latents)

    def velocity(self, latents, sigma, prompt, generator):
        """Call the transformer, for some of the prompts with the empty one."""
        dropped = torch.rand(len(prompt), generator=generator, device=prompt.device) < DROPPED
        rows = self.rows[prompt].masked_fill(dropped, 0)
        encoded = {name: tensor[rows] for name, tensor in self.encoded.items()}
        return self.architecture.velocity(
            self.parts["transformer"], latents, sigma, encoded, 1.0, self.positions
        )

    def pipeline(self, parts, **others):
        encoders = {"text_encoder": self.encoder, "tokenizer": self.tokenizer}
        return self.architecture.pipeline(**encoders, transformer=parts["transformer"], **others)


def qwen3(
    kind: Callable[[Qwen3Config], PreTrainedModel], vocabulary: int, layers: int
) -> PreTrainedModel:
    """Make a small Qwen3 of a class of transformers."""
    config = Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
    )
    return kind(config)


class Flux2Vae(TinyVae):
    """A small AutoencoderKLFlux2: batch-norm statistics per channel and place in a patch."""

    @staticmethod
    def make(side, size):
        vae = AutoencoderKLFlux2(sample_size=side, **vae_config(size))
        return quieted(vae, vae.encoder.conv_out)

    @staticmethod
    def measure(vae, latents):
        patches = Flux2KleinPipeline._patchify_latents(latents)
        vae.bn.running_mean.copy_(patches.mean((0, 2, 3)))
        vae.bn.running_var.copy_(patches.var((0, 2, 3)))

    @staticmethod
    def normalize(vae, latents):
        return vae.bn(Flux2KleinPipeline._patchify_latents(latents))


class TinyFlux2(WithLanguageModel):
    """A small FLUX.2 klein, as its base variants."""

    pipeline_class, vae = "Flux2KleinPipeline", Flux2Vae

    def make_encoder(self, vocabulary):
        # The pipeline takes the states of layers 9, 18 and 27
        return qwen3(Qwen3ForCausalLM, vocabulary, 28)

    def make_transformer(self, task):
        return Flux2Transformer2DModel(
            in_channels=32,
            num_layers=2,
            num_single_layers=2,
            attention_head_dim=32,
            num_attention_heads=4,
            joint_attention_dim=3 * WIDTH,
            guidance_embeds=False,
            axes_dims_rope=(8, 8, 8, 8),
        )


class TinyZImage(WithLanguageModel):
    """A small Z-Image."""

    pipeline_class = "ZImagePipeline"

    def make_encoder(self, vocabulary):
        return qwen3(Qwen3Model, vocabulary, 3)

    def make_transformer(self, task):
        return ZImageTransformer2DModel(
            in_channels=8,
            dim=128,
            n_layers=3,
            n_refiner_layers=1,
            n_heads=4,
            n_kv_heads=4,
            cap_feat_dim=WIDTH,
            axes_dims=(8, 12, 12),
            axes_lens=(128, 32, 32),
        )


class QwenImageVae(TinyVae):
    """A small AutoencoderKLQwenImage: an image is a video of one frame; statistics per channel."""

    @staticmethod
    def make(side, size):
        first = size.channels[0]
        vae = AutoencoderKLQwenImage(
            base_dim=first,
            z_dim=8,
            dim_mult=[channels // first for channels in size.channels],
            num_res_blocks=1,
            temperal_downsample=(False, True),
            latents_mean=(0.0,) * 8,
            latents_std=(1.0,) * 8,
        )
        torch.nn.init.zeros_(vae.quant_conv.weight[8:])
        return quieted(vae, vae.quant_conv)

    @staticmethod
    def encode(vae, images):
        return vae.encode(images.unsqueeze(2)).latent_dist

    @staticmethod
    def decode(vae, latents):
        return vae.decode(latents).sample[:, :, 0]

    @staticmethod
    def measure(vae, latents):
        mean, deviation = latents.mean((0, 2, 3, 4)), latents.std((0, 2, 3, 4))
        vae.register_to_config(latents_mean=mean.tolist(), latents_std=deviation.tolist())

    @staticmethod
    def normalize(vae, latents):
        mean, deviation = (
            torch.tensor(each, device=latents.device).view(-1, 1, 1)
            for each in (vae.config.latents_mean, vae.config.latents_std)
        )
        return (latents[:, :, 0] - mean) / deviation


class TinyQwenImage(WithLanguageModel):
    """A small Qwen-Image."""

    pipeline_class, vae = "QwenImagePipeline", QwenImageVae

    def make_encoder(self, vocabulary):
        text = {
            "vocab_size": vocabulary,
            "hidden_size": WIDTH,
            "intermediate_size": 2 * WIDTH,
            "num_hidden_layers": 3,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "max_position_embeddings": 128,
            "tie_word_embeddings": False,
            "rope_parameters": {
                "rope_type": "default",
                "mrope_section": (2, 3, 3),
                "rope_theta": 10_000.0,
            },
        }
        vision = {
            "depth": 1,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_heads": 2,
            "out_hidden_size": WIDTH,
        }
        return Qwen2_5_VLForConditionalGeneration(
            Qwen2_5_VLConfig(text_config=text, vision_config=vision)
        )

    def make_transformer(self, task):
        return QwenImageTransformer2DModel(
            in_channels=32,
            out_channels=8,
            num_layers=4,
            attention_head_dim=32,
            num_attention_heads=4,
            joint_attention_dim=WIDTH,
            axes_dims_rope=(8, 12, 12),
        )
