"""Stable Diffusion 3 and 3.5: classifier-free guidance, unpacked latents, two CLIPs and T5.

The guided velocity is v(no prompt) + guidance * (v(prompt) - v(no prompt)): two forward
evaluations. With a guidance of at most 1 it is v(prompt) alone, one evaluation, as in diffusers.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
from diffusers import SD3Transformer2DModel, StableDiffusion3Pipeline

from g2rpo_core.architectures.architecture import (
    CLIP_G,
    CLIP_L,
    JOINT_ATTENTION,
    T5_XXL,
    VAE_16,
    Architecture,
    Arguments,
    Config,
    ModelShape,
    Schedule,
    Tensors,
    sides,
)

MEDIUM: Config = {  # transformer/config.json of stabilityai/stable-diffusion-3.5-medium
    "sample_size": 128,
    "patch_size": 2,
    "in_channels": 16,
    "out_channels": 16,
    "num_layers": 24,
    "attention_head_dim": 64,
    "num_attention_heads": 24,
    "joint_attention_dim": 4096,
    "caption_projection_dim": 1536,
    "pooled_projection_dim": 2048,
    "pos_embed_max_size": 384,
    "dual_attention_layers": tuple(range(13)),
    "qk_norm": "rms_norm",
}
LARGE: Config = {  # of stabilityai/stable-diffusion-3.5-large
    **MEDIUM,
    "num_layers": 38,
    "num_attention_heads": 38,
    "caption_projection_dim": 2432,
    "pos_embed_max_size": 192,
    "dual_attention_layers": (),
}
VAE: Config = {**VAE_16, "scaling_factor": 1.5305, "shift_factor": 0.0609}
ENCODERS = {
    "text_encoder": ("CLIPTextModelWithProjection", {**CLIP_L, "hidden_act": "quick_gelu"}),
    "text_encoder_2": ("CLIPTextModelWithProjection", CLIP_G),
    "text_encoder_3": ("T5EncoderModel", T5_XXL),
}
SCHEDULER = {"shift": 3.0, "use_dynamic_shifting": False}


class StableDiffusion3(Architecture):
    """The base model of `StableDiffusion3Pipeline`."""

    label, tag = "Stable Diffusion 3", "stable-diffusion-3"
    licences = {
        "stabilityai/stable-diffusion-3.5": {  # medium and large
            "license": "other",
            "license_name": "stabilityai-ai-community",
            "license_link": "https://huggingface.co/stabilityai/stable-diffusion-3.5-medium"
            "/blob/main/LICENSE.md",
        }
    }
    pipeline, transformer = StableDiffusion3Pipeline, SD3Transformer2DModel
    tokenizers = {"tokenizer": "clip", "tokenizer_2": "clip", "tokenizer_3": "t5"}
    text_encoders = ("text_encoder", "text_encoder_2", "text_encoder_3")
    encoding = ("context", "pooled")
    has_negative = True
    # As Flow-GRPO: the joint attention, not the image tokens' second one (attn2)
    lora_targets = tuple(f"attn.{name}" for name in JOINT_ATTENTION)
    published = {
        "stabilityai/stable-diffusion-3.5-medium": ModelShape(MEDIUM, VAE, ENCODERS, SCHEDULER),
        "stabilityai/stable-diffusion-3.5-large": ModelShape(LARGE, VAE, ENCODERS, SCHEDULER),
    }

    def encode(
        self, pipeline: StableDiffusion3Pipeline, texts: Sequence[str], max_length: int
    ) -> dict[str, torch.Tensor]:
        context, _, pooled, _ = pipeline.encode_prompt(
            list(texts),
            None,
            None,
            do_classifier_free_guidance=False,
            max_sequence_length=max_length,
        )
        return {"context": context, "pooled": pooled}

    def encoding_shapes(
        self, transformer: Config, max_length: int, clip_length: int
    ) -> dict[str, tuple[int, ...]]:
        """Return the shapes: both CLIPs' tokens, zero-padded to T5's width, come before T5's."""
        width = transformer["joint_attention_dim"]
        return {
            "context": (clip_length + max_length, width),
            "pooled": (transformer["pooled_projection_dim"],),
        }

    def longest_side(self, transformer: Config) -> int | None:
        """Return where the table of positions ends."""
        return transformer["pos_embed_max_size"] * transformer["patch_size"]

    def schedule(self, config: Config, image_tokens: int) -> Schedule:
        """Return the sigmas of the scheduler, which shifts its smallest one twice."""
        schedule = super().schedule(config, image_tokens)
        smallest = 1 / config["num_train_timesteps"]
        if not config["use_dynamic_shifting"]:
            smallest = config["shift"] * smallest / (1 + (config["shift"] - 1) * smallest)
        return replace(schedule, last=smallest)

    def forward_evals(self, guidance: float) -> int:
        return 2 if guidance > 1 else 1

    def velocity(
        self,
        transformer: SD3Transformer2DModel,
        latents: torch.Tensor,
        sigma: torch.Tensor,
        encoded: Tensors,
        guidance: float,
        positions: Tensors,
    ) -> torch.Tensor:
        return transformer(
            hidden_states=latents,
            timestep=1000 * sigma,
            pooled_projections=encoded["pooled"],
            encoder_hidden_states=encoded["context"],
            return_dict=False,
        )[0]

    def inputs(
        self, config: Config, batch: int, image_tokens: int, text_tokens: int, device: str
    ) -> Arguments:
        zeros = partial(torch.zeros, device=device)
        rows, columns = (config["patch_size"] * side for side in sides(image_tokens))
        return {
            "hidden_states": zeros(batch, config["in_channels"], rows, columns),
            "timestep": zeros(batch),
            "pooled_projections": zeros(batch, config["pooled_projection_dim"]),
            "encoder_hidden_states": zeros(batch, text_tokens, config["joint_attention_dim"]),
            "return_dict": False,
        }

    def shallow(self, config: Config) -> tuple[Config, list[tuple[Config, int]]]:
        """Return configurations with two blocks of each kind.

        Blocks with a second attention come first; the last block, always without one, drops the
        text. Two of each: with checkpointing, the peak comes while a block with a second attention
        is recomputed after those before it.
        """
        dual = len(config["dual_attention_layers"])
        plain = config["num_layers"] - dual
        config_with = lambda dual, plain: {
            **config,
            "num_layers": dual + plain,
            "dual_attention_layers": tuple(range(dual)),
        }
        first = (min(dual, 2), min(plain, 2))
        more = [
            (config_with(first[0] + 1, first[1]), dual - first[0]),
            (config_with(first[0], first[1] + 1), plain - first[1]),
        ]
        return config_with(*first), [(deeper, times) for deeper, times in more if times]
