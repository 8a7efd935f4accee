"""A tiny Stable Diffusion 3.5, not trained yet: dual attention in its first block and normalized queries and keys, as Medium's."""

import torch
import torch.nn.functional as F
from diffusers import SD3Transformer2DModel, StableDiffusion3Pipeline
from transformers import CLIPTextConfig, CLIPTextModelWithProjection, CLIPTokenizer, T5Config, T5EncoderModel

from g2rpo_core.tiny_models.pipeline import initialize
from g2rpo_core.tiny_models.settings import TOKEN
from g2rpo_core.tiny_models.tokenizers import CLIP_LENGTH, T5_LENGTH, clip_tokenizer, t5_tokenizer
from g2rpo_core.worlds.world import World

DROPPED = 0.1  # share of captions that are trained as the empty prompt, for classifier-free guidance
WIDTH = 64  # of T5; the two CLIPs fill it side by side


class TinyStableDiffusion3:
    """A `Small` of Stable Diffusion 3's classes."""

    def __init__(self, world: World, captions: list[str]):
        self.clip_tokens, self.t5_tokens = clip_tokenizer(), t5_tokenizer(world)
        clips = {name: _clip(self.clip_tokens) for name in ("clip_l", "clip_g")}
        t5 = T5EncoderModel(
            T5Config(vocab_size=len(self.t5_tokens), d_model=WIDTH, d_ff=128, d_kv=32, num_layers=2, num_heads=2, dropout_rate=0)
        )
        transformer = SD3Transformer2DModel(
            sample_size=world.size // TOKEN * 2, patch_size=2, in_channels=8, out_channels=8, num_layers=4, attention_head_dim=32, num_attention_heads=4,
            joint_attention_dim=WIDTH, caption_projection_dim=128, pooled_projection_dim=WIDTH, pos_embed_max_size=world.size // TOKEN * 2,
            dual_attention_layers=(0,), qk_norm="rms_norm",
        )  # fmt: skip
        initialize(transformer)
        self.parts = torch.nn.ModuleDict({"transformer": transformer, **clips, "t5": t5})
        texts = [*captions, ""]  # the last one is the empty prompt
        self.clip_ids = self.clip_tokens(texts, padding="max_length", return_tensors="pt").input_ids
        self.t5_ids = self.t5_tokens(texts, padding="max_length", max_length=T5_LENGTH, return_tensors="pt").input_ids

    def pack(self, latents: torch.Tensor) -> torch.Tensor:
        """As they are."""
        return latents

    def velocity(self, latents, sigma, prompt, generator):
        """The prompts are encoded as by `StableDiffusion3Pipeline.encode_prompt`."""
        dropped = torch.rand(len(prompt), generator=generator) < DROPPED
        prompt = prompt.masked_fill(dropped, len(self.clip_ids) - 1)
        clips = [self.parts[name](self.clip_ids[prompt], output_hidden_states=True) for name in ("clip_l", "clip_g")]
        context = torch.cat([clip.hidden_states[-2] for clip in clips], -1)
        context = F.pad(context, (0, WIDTH - context.shape[-1]))
        return self.parts["transformer"](
            hidden_states=latents,
            timestep=1000 * sigma,
            pooled_projections=torch.cat([clip.text_embeds for clip in clips], -1),
            encoder_hidden_states=torch.cat([context, self.parts["t5"](self.t5_ids[prompt]).last_hidden_state], 1),
            return_dict=False,
        )[0]

    def pipeline(self, parts, **others) -> StableDiffusion3Pipeline:
        return StableDiffusion3Pipeline(
            text_encoder=parts["clip_l"],
            tokenizer=self.clip_tokens,
            text_encoder_2=parts["clip_g"],
            tokenizer_2=self.clip_tokens,
            text_encoder_3=parts["t5"],
            tokenizer_3=self.t5_tokens,
            transformer=parts["transformer"],
            **others,
        )


def _clip(tokens: CLIPTokenizer) -> CLIPTextModelWithProjection:
    return CLIPTextModelWithProjection(
        CLIPTextConfig(
            vocab_size=len(tokens), hidden_size=WIDTH // 2, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
            projection_dim=WIDTH // 2, max_position_embeddings=CLIP_LENGTH, bos_token_id=tokens.bos_token_id,
            eos_token_id=tokens.eos_token_id,
        )
    )  # fmt: skip
