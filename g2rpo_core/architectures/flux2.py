"""FLUX.2 [klein]: classifier-free guidance, packed latents, and three layers of Qwen3.

The VAE's statistics normalize the latents. The base variants are trained; those that are distilled
to four steps only generate, with a guidance of 1.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from math import exp

import torch
import torch.nn.functional as F
from diffusers import AutoencoderKLFlux2, Flux2KleinPipeline, Flux2Transformer2DModel
from diffusers.pipelines.flux2.pipeline_flux2_klein import compute_empirical_mu
from transformers import PreTrainedTokenizerBase

from g2rpo_core.architectures.architecture import (
    JOINT_ATTENTION,
    QWEN3_4B,
    Architecture,
    Arguments,
    Config,
    ModelShape,
    Schedule,
    Tensors,
    chat,
)
from g2rpo_core.architectures.original import ATTENTION, SHIFT_FIRST, Original, of_two_kinds

TRANSFORMER: Config = {  # of black-forest-labs/FLUX.2-klein-base-4B
    "patch_size": 1,
    "in_channels": 128,
    "num_layers": 5,
    "num_single_layers": 20,
    "attention_head_dim": 128,
    "num_attention_heads": 24,
    "joint_attention_dim": 7680,
    "guidance_embeds": False,
    "axes_dims_rope": (32, 32, 32, 32),
}
LARGE = {
    **TRANSFORMER,
    "num_layers": 8,
    "num_single_layers": 24,
    "num_attention_heads": 32,
    "joint_attention_dim": 12288,
}
QWEN3_8B = {
    **QWEN3_4B,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "tie_word_embeddings": False,
}
VAE: Config = {"block_out_channels": (128, 256, 512, 512), "latent_channels": 32}
SCHEDULER = {"shift": 3.0, "use_dynamic_shifting": True}
OWNER = "black-forest-labs/FLUX.2-klein"
# Original names (github.com/black-forest-labs/flux2, `src/flux2/model.py`)
_TIME = "time_guidance_embed"
OUTSIDE_BLOCKS = {
    "img_in": "x_embedder",
    "txt_in": "context_embedder",
    "time_in.in_layer": f"{_TIME}.timestep_embedder.linear_1",
    "time_in.out_layer": f"{_TIME}.timestep_embedder.linear_2",
    "guidance_in.in_layer": f"{_TIME}.guidance_embedder.linear_1",
    "guidance_in.out_layer": f"{_TIME}.guidance_embedder.linear_2",
    "double_stream_modulation_img.lin": "double_stream_modulation_img.linear",
    "double_stream_modulation_txt.lin": "double_stream_modulation_txt.linear",
    "single_stream_modulation.lin": "single_stream_modulation.linear",
    "final_layer.linear": "proj_out",
    SHIFT_FIRST: "norm_out.linear",
}
DOUBLE = {
    **ATTENTION,
    "img_mlp.0": ["ff.linear_in"],
    "img_mlp.2": ["ff.linear_out"],
    "txt_mlp.0": ["ff_context.linear_in"],
    "txt_mlp.2": ["ff_context.linear_out"],
}
SINGLE = {
    "linear1": ["attn.to_qkv_mlp_proj"],
    "linear2": ["attn.to_out"],
    "norm.query_norm": ["attn.norm_q"],
    "norm.key_norm": ["attn.norm_k"],
}


def shape(transformer: Config, encoder: Config) -> ModelShape:
    return ModelShape(transformer, VAE, {"text_encoder": ("Qwen3ForCausalLM", encoder)}, SCHEDULER)


class Flux2Klein(Architecture):
    """The base model of `Flux2KleinPipeline`."""

    label, tag = "FLUX.2 klein", "flux2"
    licences = {
        f"{OWNER}-base-4B": {"license": "apache-2.0"},
        f"{OWNER}-base-9B": {
            "license": "other",
            "license_name": "flux-non-commercial-license",
            "license_link": f"https://huggingface.co/{OWNER}-base-9B/blob/main/LICENSE.md",
        },
    }
    pipeline, transformer, vae = Flux2KleinPipeline, Flux2Transformer2DModel, AutoencoderKLFlux2
    tokenizers = {"tokenizer": "qwen"}
    text_encoders = ("text_encoder",)
    encoding = ("context",)
    has_negative = True
    forms = ("diffusers", "original", "lora", "peft", "kohya")
    # Attention; in single blocks, one matrix makes queries, keys, values and the MLP's input
    lora_targets = (*JOINT_ATTENTION, "to_qkv_mlp_proj")
    published = {
        f"{OWNER}-base-4B": shape(TRANSFORMER, QWEN3_4B),
        f"{OWNER}-base-9B": shape(LARGE, QWEN3_8B),
    }
    distilled = {f"{OWNER}-{size}": f"{OWNER}-base-{size}" for size in ("4B", "9B")}

    def encode(
        self, pipeline: Flux2KleinPipeline, texts: Sequence[str], max_length: int
    ) -> dict[str, torch.Tensor]:
        return {"context": pipeline.encode_prompt(list(texts), max_sequence_length=max_length)[0]}

    def wrapped(self, tokenizer: PreTrainedTokenizerBase, text: str) -> str:
        return chat(tokenizer, text, thinking=False)

    def encoding_shapes(
        self, transformer: Config, max_length: int, clip_length: int
    ) -> dict[str, tuple[int, ...]]:
        return {"context": (max_length, transformer["joint_attention_dim"])}

    def latent_shape(self, vae: Config, rows: int, columns: int) -> tuple[int, ...]:
        return 4 * vae["latent_channels"], rows // 2, columns // 2

    def pack(self, latents: torch.Tensor) -> torch.Tensor:
        return Flux2KleinPipeline._pack_latents(latents)

    def unpack(self, latents: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
        return latents.transpose(1, 2).unflatten(2, (rows // 2, columns // 2))

    def decode(self, vae: AutoencoderKLFlux2, latents: torch.Tensor) -> torch.Tensor:
        mean, variance = (
            statistic.view(1, -1, 1, 1) for statistic in (vae.bn.running_mean, vae.bn.running_var)
        )
        latents = latents * torch.sqrt(variance + vae.config.batch_norm_eps) + mean
        return vae.decode(Flux2KleinPipeline._unpatchify_latents(latents), return_dict=False)[0]

    def schedule(self, config: Config, image_tokens: int) -> Schedule:
        """Return the sigmas; their shift depends on the number of steps, too."""
        if not config["use_dynamic_shifting"]:
            return super().schedule(config, image_tokens)
        return Schedule(
            lambda steps: exp(compute_empirical_mu(image_tokens, steps)),
            terminal=config["shift_terminal"],
        )

    def forward_evals(self, guidance: float) -> int:
        return 2 if guidance > 1 else 1

    def positions(self, rows: int, columns: int, device: torch.device) -> dict[str, torch.Tensor]:
        return {
            "img_ids": Flux2KleinPipeline._prepare_latent_ids(
                torch.empty(1, 0, rows // 2, columns // 2)
            )[0].to(device)
        }

    def velocity(
        self,
        transformer: Flux2Transformer2DModel,
        latents: torch.Tensor,
        sigma: torch.Tensor,
        encoded: Tensors,
        guidance: float,
        positions: Tensors,
    ) -> torch.Tensor:
        context = encoded["context"]
        return transformer(
            # float32, as sigma, so that the model multiplies by 1000 in float32, too
            hidden_states=latents,
            timestep=sigma,
            encoder_hidden_states=context,
            txt_ids=F.pad(torch.arange(context.shape[1], device=context.device)[:, None], (3, 0)),
            **positions,
            return_dict=False,
        )[0]

    def blocks(self, transformer: Flux2Transformer2DModel) -> list[torch.nn.Module]:
        return [*transformer.transformer_blocks, *transformer.single_transformer_blocks]

    def inputs(
        self, config: Config, batch: int, image_tokens: int, text_tokens: int, device: str
    ) -> Arguments:
        zeros = partial(torch.zeros, device=device)
        return {
            "hidden_states": zeros(batch, image_tokens, config["in_channels"]),
            "timestep": zeros(batch),
            "encoder_hidden_states": zeros(batch, text_tokens, config["joint_attention_dim"]),
            "txt_ids": zeros(text_tokens, 4),
            "img_ids": zeros(image_tokens, 4),
            "return_dict": False,
        }

    def original_modules(self, config: Config) -> Iterator[Original]:
        return of_two_kinds(OUTSIDE_BLOCKS, DOUBLE, SINGLE, config)


ARCHITECTURE = Flux2Klein()
