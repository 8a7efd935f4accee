"""Qwen-Image: norm-preserving guidance, packed latents of a video VAE, and Qwen2.5-VL."""

from collections.abc import Sequence
from functools import partial

import torch
from diffusers import AutoencoderKLQwenImage, QwenImagePipeline, QwenImageTransformer2DModel
from transformers import PreTrainedTokenizerBase

from g2rpo_core.architectures.architecture import (
    JOINT_ATTENTION,
    MASK,
    Architecture,
    Arguments,
    Config,
    ModelShape,
    Tensors,
    read,
    sides,
)

TRANSFORMER: Config = {  # of Qwen/Qwen-Image, as are the other parts
    "patch_size": 2,
    "in_channels": 64,
    "out_channels": 16,
    "num_layers": 60,
    "attention_head_dim": 128,
    "num_attention_heads": 24,
    "joint_attention_dim": 3584,
    "axes_dims_rope": (16, 56, 56),
}
VAE: Config = {
    "base_dim": 96,
    "z_dim": 16,
    "num_res_blocks": 2,
    "temperal_downsample": (False, True, True),
}
QWEN25_VL: Config = {  # Qwen/Qwen2.5-VL-7B-Instruct
    "text_config": {
        "vocab_size": 152064,
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "max_position_embeddings": 128000,
        "tie_word_embeddings": False,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1_000_000,
            "mrope_section": (16, 24, 24),
        },
    },
    "vision_config": {
        "depth": 32,
        "hidden_size": 1280,
        "intermediate_size": 3420,
        "num_heads": 16,
        "out_hidden_size": 3584,
        "patch_size": 14,
        "window_size": 112,
        "fullatt_block_indexes": (7, 15, 23, 31),
    },
}
SCHEDULER = {
    "use_dynamic_shifting": True,
    "base_shift": 0.5,
    "max_shift": 0.9,
    "max_image_seq_len": 8192,
    "shift_terminal": 0.02,
}
SHAPE = ModelShape(
    TRANSFORMER, VAE, {"text_encoder": ("Qwen2_5_VLForConditionalGeneration", QWEN25_VL)}, SCHEDULER
)


class QwenImage(Architecture):
    """The base model of `QwenImagePipeline`."""

    label, tag = "Qwen-Image", "qwen-image"
    licences = {"Qwen/Qwen-Image": {"license": "apache-2.0"}}
    pipeline = QwenImagePipeline
    transformer = QwenImageTransformer2DModel
    vae = AutoencoderKLQwenImage
    tokenizers = {"tokenizer": "qwen"}
    text_encoders = ("text_encoder",)
    encoding = padded = ("context", MASK)
    forms = ("diffusers", "lora", "peft", "kohya")
    has_negative, negative = True, " "  # as in its model card
    lora_targets = JOINT_ATTENTION
    published = {"Qwen/Qwen-Image": SHAPE}

    def encode(
        self, pipeline: QwenImagePipeline, texts: Sequence[str], max_length: int
    ) -> dict[str, torch.Tensor]:
        """Encode as the pipeline does, but zero-padded to one length, so that shapes are equal."""
        texts = [pipeline.prompt_template_encode.format(text) for text in texts]
        return read(
            pipeline, texts, max_length, layer=-1, dropped=pipeline.prompt_template_encode_start_idx
        )

    def wrapped(self, tokenizer: PreTrainedTokenizerBase, text: str) -> str:
        # The template's end alone: `encode` drops the tokens before the text
        return f"{text}<|im_end|>\n<|im_start|>assistant\n"

    def encoding_shapes(
        self, transformer: Config, max_length: int, clip_length: int
    ) -> dict[str, tuple[int, ...]]:
        return {"context": (max_length, transformer["joint_attention_dim"]), "mask": (max_length,)}

    def vae_factor(self, vae: Config) -> int:
        return 2 ** len(vae["temperal_downsample"])

    def latent_shape(self, vae: Config, rows: int, columns: int) -> tuple[int, ...]:
        return vae["z_dim"], rows, columns

    def pack(self, latents: torch.Tensor) -> torch.Tensor:
        return QwenImagePipeline._pack_latents(latents, *latents.shape)

    def unpack(self, latents: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
        return QwenImagePipeline._unpack_latents(latents, rows, columns, 1)[:, :, 0]

    def decode(self, vae: AutoencoderKLQwenImage, latents: torch.Tensor) -> torch.Tensor:
        """Decode latents [N, channels, rows, columns], each as a video with one frame."""
        mean, deviation = (
            torch.tensor(statistic, device=latents.device).view(-1, 1, 1)
            for statistic in (vae.config.latents_mean, vae.config.latents_std)
        )
        return vae.decode((latents * deviation + mean).unsqueeze(2), return_dict=False)[0][:, :, 0]

    def pipeline_guidance(self, guidance: float) -> Arguments:
        """Return them: without a negative prompt the pipeline applies no guidance."""
        return {"true_cfg_scale": guidance, "negative_prompt": self.negative}

    def forward_evals(self, guidance: float) -> int:
        return 2 if guidance > 1 else 1

    def guided(
        self, without: torch.Tensor, with_prompt: torch.Tensor, guidance: float
    ) -> torch.Tensor:
        guided = super().guided(without, with_prompt, guidance)
        return guided * (with_prompt.norm(dim=-1, keepdim=True) / guided.norm(dim=-1, keepdim=True))

    def complete(self, transformer: QwenImageTransformer2DModel) -> None:
        """Compute the tables of positions, which are neither parameters nor buffers."""
        rope = transformer.pos_embed
        with torch.device("cpu"):
            transformer.pos_embed = type(rope)(rope.theta, rope.axes_dim, rope.scale_rope)

    def idle(self, transformer: Config) -> tuple[str, ...]:
        """Return what makes the text of the last block, which nothing reads."""
        last = f"transformer_blocks.{transformer['num_layers'] - 1}."
        return (f"{last}attn.to_add_out.", f"{last}txt_mlp.")

    def positions(self, rows: int, columns: int, device: torch.device) -> Arguments:
        return {"img_shapes": [[(1, rows // 2, columns // 2)]]}

    def velocity(
        self,
        transformer: QwenImageTransformer2DModel,
        latents: torch.Tensor,
        sigma: torch.Tensor,
        encoded: Tensors,
        guidance: float,
        positions: Tensors,
    ) -> torch.Tensor:
        # diffusers rounds sigma to the dtype of the hidden states
        hook = transformer.time_text_embed.register_forward_pre_hook(
            lambda _, given: (sigma, *given[1:])
        )
        try:
            return transformer(
                hidden_states=latents,
                timestep=sigma,  # the model multiplies by 1000 itself
                encoder_hidden_states=encoded["context"],
                encoder_hidden_states_mask=encoded[MASK].bool() if MASK in encoded else None,
                **positions,
                return_dict=False,
            )[0]
        finally:
            hook.remove()

    def inputs(
        self, config: Config, batch: int, image_tokens: int, text_tokens: int, device: str
    ) -> Arguments:
        zeros = partial(torch.zeros, device=device)
        return {
            "hidden_states": zeros(batch, image_tokens, config["in_channels"]),
            "timestep": zeros(batch),
            "encoder_hidden_states": zeros(batch, text_tokens, config["joint_attention_dim"]),
            "encoder_hidden_states_mask": torch.ones(
                batch, text_tokens, dtype=torch.bool, device=device
            ),
            "img_shapes": [[(1, *sides(image_tokens))]],
            "return_dict": False,
        }

    def shallow(self, config: Config) -> tuple[Config, list[tuple[Config, int]]]:
        """Return configurations of two and three blocks.

        With activation checkpointing, the peak comes while one block is recomputed after another,
        so a single block would not show it.
        """
        return {**config, "num_layers": 2}, [
            ({**config, "num_layers": 3}, config["num_layers"] - 2)
        ]


ARCHITECTURE = QwenImage()
