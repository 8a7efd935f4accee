"""A tiny FLUX, not trained yet."""

import torch
from diffusers import FluxPipeline, FluxTransformer2DModel
from transformers import CLIPTextConfig, CLIPTextModel, T5Config, T5EncoderModel

from g2rpo_core.tiny_models.pipeline import initialize
from g2rpo_core.tiny_models.settings import TOKEN
from g2rpo_core.tiny_models.tokenizers import CLIP_LENGTH, T5_LENGTH, clip_tokenizer, t5_tokenizer
from g2rpo_core.worlds.world import World

GUIDANCE = 3.5  # FLUX.1-dev takes its guidance scale as an input; the tiny one is trained at this value alone


class TinyFlux:
    """A `Small` of FLUX's classes."""

    def __init__(self, world: World, captions: list[str]):
        self.clip_tokens, self.t5_tokens = clip_tokenizer(), t5_tokenizer(world)
        clip = CLIPTextModel(
            CLIPTextConfig(
                vocab_size=len(self.clip_tokens), hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=2,
                projection_dim=64, max_position_embeddings=CLIP_LENGTH,
                bos_token_id=self.clip_tokens.bos_token_id, eos_token_id=self.clip_tokens.eos_token_id,
            )
        )  # fmt: skip
        t5 = T5EncoderModel(
            T5Config(vocab_size=len(self.t5_tokens), d_model=64, d_ff=128, d_kv=32, num_layers=2, num_heads=2, dropout_rate=0)
        )
        transformer = FluxTransformer2DModel(
            in_channels=32, num_layers=2, num_single_layers=2, attention_head_dim=32, num_attention_heads=4,
            joint_attention_dim=64, pooled_projection_dim=64, guidance_embeds=True, axes_dims_rope=(8, 12, 12),
        )  # fmt: skip
        initialize(transformer)
        self.parts = torch.nn.ModuleDict({"transformer": transformer, "clip": clip, "t5": t5})
        self.clip_ids = self.clip_tokens(captions, padding="max_length", return_tensors="pt").input_ids
        self.t5_ids = self.t5_tokens(captions, padding="max_length", max_length=T5_LENGTH, return_tensors="pt").input_ids
        tokens = world.size // TOKEN
        self.image_ids = FluxPipeline._prepare_latent_image_ids(1, tokens, tokens, "cpu", torch.float32)
        self.text_ids = torch.zeros(T5_LENGTH, 3)

    def pack(self, latents: torch.Tensor) -> torch.Tensor:
        """[N, 8, rows, columns] -> [N, rows * columns / 4, 32]."""
        return FluxPipeline._pack_latents(latents, *latents.shape)

    def velocity(self, latents, sigma, prompt, generator):
        return self.parts["transformer"](
            hidden_states=latents,
            timestep=sigma,
            guidance=torch.full_like(sigma, GUIDANCE),
            pooled_projections=self.parts["clip"](self.clip_ids[prompt]).pooler_output,
            encoder_hidden_states=self.parts["t5"](self.t5_ids[prompt]).last_hidden_state,
            txt_ids=self.text_ids,
            img_ids=self.image_ids,
            return_dict=False,
        )[0]

    def pipeline(self, parts, **others) -> FluxPipeline:
        return FluxPipeline(
            text_encoder=parts["clip"],
            tokenizer=self.clip_tokens,
            text_encoder_2=parts["t5"],
            tokenizer_2=self.t5_tokens,
            transformer=parts["transformer"],
            **others,
        )
