"""FLUX.1: embedded guidance, packed latents, a T5 context and a pooled CLIP state.

FLUX.1-schnell takes no guidance. Weights can be written under the original names, those of Black
Forest Labs' checkpoints (github.com/black-forest-labs/flux, `src/flux/model.py`). If an original
module stacks several of diffusers' modules, the tables list them in that order.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from diffusers import FluxPipeline, FluxTransformer2DModel

from g2rpo_core.architectures.architecture import (
    CLIP_L,
    JOINT_ATTENTION,
    T5_XXL,
    VAE_16,
    Architecture,
    Arguments,
    Config,
    ModelShape,
    Tensors,
)
from g2rpo_core.architectures.original import ATTENTION, SHIFT_FIRST, Original, of_two_kinds

TRANSFORMER: Config = {  # FLUX.1-dev's, as are the other parts, at 3de623fc3c33
    "patch_size": 1,
    "in_channels": 64,
    "num_layers": 19,
    "num_single_layers": 38,
    "attention_head_dim": 128,
    "num_attention_heads": 24,
    "joint_attention_dim": 4096,
    "pooled_projection_dim": 768,
    "guidance_embeds": True,
    "axes_dims_rope": (16, 56, 56),
}
VAE: Config = {**VAE_16, "scaling_factor": 0.3611, "shift_factor": 0.1159}
ENCODERS = {"text_encoder": ("CLIPTextModel", CLIP_L), "text_encoder_2": ("T5EncoderModel", T5_XXL)}
DEVS = ("black-forest-labs/FLUX.1-dev", "black-forest-labs/FLUX.1-Krea-dev")
DEV_LICENCE = {"license": "other", "license_name": "flux-1-dev-non-commercial-license"}
DEV = ModelShape(TRANSFORMER, VAE, ENCODERS, {"shift": 3.0, "use_dynamic_shifting": True})
# Original names
_TIME = "time_text_embed"
OUTSIDE_BLOCKS = {
    "img_in": "x_embedder",
    "txt_in": "context_embedder",
    "time_in.in_layer": f"{_TIME}.timestep_embedder.linear_1",
    "time_in.out_layer": f"{_TIME}.timestep_embedder.linear_2",
    "vector_in.in_layer": f"{_TIME}.text_embedder.linear_1",
    "vector_in.out_layer": f"{_TIME}.text_embedder.linear_2",
    "guidance_in.in_layer": f"{_TIME}.guidance_embedder.linear_1",
    "guidance_in.out_layer": f"{_TIME}.guidance_embedder.linear_2",
    "final_layer.linear": "proj_out",
    SHIFT_FIRST: "norm_out.linear",
}
DOUBLE = {
    "img_mod.lin": ["norm1.linear"],
    "txt_mod.lin": ["norm1_context.linear"],
    **ATTENTION,
    "img_mlp.0": ["ff.net.0.proj"],
    "img_mlp.2": ["ff.net.2"],
    "txt_mlp.0": ["ff_context.net.0.proj"],
    "txt_mlp.2": ["ff_context.net.2"],
}
SINGLE = {
    "modulation.lin": ["norm.linear"],
    "linear1": ["attn.to_q", "attn.to_k", "attn.to_v", "proj_mlp"],
    "linear2": ["proj_out"],
    "norm.query_norm": ["attn.norm_q"],
    "norm.key_norm": ["attn.norm_k"],
}


@contextmanager
def exact_times(
    transformer: FluxTransformer2DModel, sigma: torch.Tensor, guidance: torch.Tensor | None
) -> Iterator[None]:
    """Make the transformer embed sigma [N] and guidance [N] as float32 within the block.

    diffusers multiplies both by 1000 in the dtype of the hidden states: in bfloat16 the model
    would see 976 for a sigma of 0.97826, and 3504 for a guidance of 3.5
    (`FluxTransformer2DModel.forward`).
    """
    times = (1000 * sigma,) if guidance is None else (1000 * sigma, 1000 * guidance)
    hook = transformer.time_text_embed.register_forward_pre_hook(
        lambda _, given: (*times, given[-1])
    )
    try:
        yield
    finally:
        hook.remove()


class Flux(Architecture):
    """The base model of `FluxPipeline`."""

    label, tag = "FLUX.1", "flux"
    licences = {
        "black-forest-labs/FLUX.1-schnell": {"license": "apache-2.0"},
        DEVS[0]: DEV_LICENCE
        | {"license_link": f"https://huggingface.co/{DEVS[0]}/blob/main/LICENSE.md"},
        DEVS[1]: DEV_LICENCE
        | {"license_link": f"https://huggingface.co/{DEVS[1]}/blob/main/LICENSE.md"},
    }
    pipeline, transformer = FluxPipeline, FluxTransformer2DModel
    tokenizers = {"tokenizer": "clip", "tokenizer_2": "t5"}
    text_encoders = ("text_encoder", "text_encoder_2")
    encoding = ("context", "pooled")
    lora_targets = JOINT_ATTENTION
    forms = ("diffusers", "original", "lora", "peft", "kohya")
    published = {
        **dict.fromkeys(DEVS, DEV),
        "black-forest-labs/FLUX.1-schnell": ModelShape(
            {**TRANSFORMER, "guidance_embeds": False},
            VAE,
            ENCODERS,
            {"shift": 1.0, "use_dynamic_shifting": False},
        ),
    }

    def encode(
        self, pipeline: FluxPipeline, texts: Sequence[str], max_length: int
    ) -> dict[str, torch.Tensor]:
        context, pooled, _ = pipeline.encode_prompt(
            list(texts), None, max_sequence_length=max_length
        )
        return {"context": context, "pooled": pooled}

    def encoding_shapes(
        self, transformer: Config, max_length: int, clip_length: int
    ) -> dict[str, tuple[int, ...]]:
        return {
            "context": (max_length, transformer["joint_attention_dim"]),
            "pooled": (transformer["pooled_projection_dim"],),
        }

    def pack(self, latents: torch.Tensor) -> torch.Tensor:
        return FluxPipeline._pack_latents(latents, *latents.shape)

    def unpack(self, latents: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
        return FluxPipeline._unpack_latents(latents, rows, columns, 1)

    def positions(self, rows: int, columns: int, device: torch.device) -> dict[str, torch.Tensor]:
        return {
            "img_ids": FluxPipeline._prepare_latent_image_ids(
                1, rows // 2, columns // 2, device, torch.float32
            )
        }

    def velocity(
        self,
        transformer: FluxTransformer2DModel,
        latents: torch.Tensor,
        sigma: torch.Tensor,
        encoded: Tensors,
        guidance: float,
        positions: Tensors,
    ) -> torch.Tensor:
        scale = torch.full_like(sigma, guidance) if transformer.config.guidance_embeds else None
        with exact_times(transformer, sigma, scale):
            return transformer(
                hidden_states=latents,
                timestep=sigma,  # the model multiplies by 1000 itself
                guidance=scale,
                pooled_projections=encoded["pooled"],
                encoder_hidden_states=encoded["context"],
                txt_ids=torch.zeros(encoded["context"].shape[1], 3, device=latents.device),
                **positions,
                return_dict=False,
            )[0]

    def blocks(self, transformer: FluxTransformer2DModel) -> list[torch.nn.Module]:
        return [*transformer.transformer_blocks, *transformer.single_transformer_blocks]

    def inputs(
        self, config: Config, batch: int, image_tokens: int, text_tokens: int, device: str
    ) -> Arguments:
        zeros = partial(torch.zeros, device=device)
        return {
            "hidden_states": zeros(batch, image_tokens, config["in_channels"]),
            "timestep": zeros(batch),
            "guidance": zeros(batch) if config["guidance_embeds"] else None,
            "pooled_projections": zeros(batch, config["pooled_projection_dim"]),
            "encoder_hidden_states": zeros(batch, text_tokens, config["joint_attention_dim"]),
            "txt_ids": zeros(text_tokens, 3),
            "img_ids": zeros(image_tokens, 3),
            "return_dict": False,
        }

    def original_modules(self, config: Config) -> Iterator[Original]:
        return of_two_kinds(OUTSIDE_BLOCKS, DOUBLE, SINGLE, config)
