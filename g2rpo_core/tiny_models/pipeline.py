"""The tiny text-to-image model: a FluxPipeline of the published classes, trained here on shape scenes."""

import copy

import torch
import torch.nn.functional as F
from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel
from transformers import CLIPTextConfig, CLIPTextModel, T5Config, T5EncoderModel

from g2rpo_core.shapes.scenes import SIZE, Scene
from g2rpo_core.tiny_models.fit import fit
from g2rpo_core.tiny_models.settings import FitSettings
from g2rpo_core.tiny_models.tokenizers import CLIP_LENGTH, T5_LENGTH, clip_tokenizer, t5_tokenizer

GUIDANCE = 3.5  # FLUX.1-dev takes its guidance scale as an input; the tiny one is trained at this value alone
KL_WEIGHT = 1e-6
LOG_VARIANCE = -4.0  # of the latents before the VAE has learned any: at 0 its noise would hide them for hundreds of steps
EMA_DECAY = 0.99


def train_vae(images: torch.Tensor, how: FitSettings, seed: int) -> tuple[AutoencoderKL, dict]:
    """AutoencoderKL with 8 latent channels at a quarter of the size, for images [N, 3, 32, 32] in [-1, 1].

    Its config holds the mean and the standard deviation of the latents as shift and scaling factor, like FLUX's.
    """
    torch.manual_seed(seed)
    vae = AutoencoderKL(
        sample_size=SIZE, block_out_channels=(16, 32, 32), layers_per_block=1, latent_channels=8, norm_num_groups=8,
        down_block_types=("DownEncoderBlock2D",) * 3, up_block_types=("UpDecoderBlock2D",) * 3,
        use_quant_conv=False, use_post_quant_conv=False, mid_block_add_attention=False,
    )  # fmt: skip
    for name, parameter in vae.named_parameters():  # every residual block is the identity at first, which halves the steps
        if "resnets" in name and "conv2" in name:
            torch.nn.init.zeros_(parameter)
    torch.nn.init.constant_(vae.encoder.conv_out.bias[vae.config.latent_channels :], LOG_VARIANCE)
    generator = torch.Generator().manual_seed(seed)

    def loss_of(indices):
        batch = images[indices]
        posterior = vae.encode(batch).latent_dist
        decoded = vae.decode(posterior.sample(generator)).sample
        return F.l1_loss(decoded, batch) + F.mse_loss(decoded, batch) + KL_WEIGHT * posterior.kl().mean()

    loss = fit([vae], loss_of, how, generator, len(images), "vae")
    vae.eval()
    latents = encode(vae, images[:2048])
    vae.register_to_config(shift_factor=latents.mean().item(), scaling_factor=1 / latents.std().item())
    return vae, {"loss": loss}


@torch.no_grad()
def encode(vae: AutoencoderKL, images: torch.Tensor) -> torch.Tensor:
    """Means of the latents, [N, 8, 8, 8], not yet shifted or scaled."""
    return torch.cat([vae.encode(batch).latent_dist.mean for batch in images.split(256)])


def train_flux(
    vae: AutoencoderKL, scenes: list[Scene], images: torch.Tensor, how: FitSettings, seed: int
) -> tuple[FluxPipeline, dict]:
    """FLUX transformer, CLIP and T5 encoders trained together by flow matching, as an averaged pipeline.

    scenes, images [N, 3, 32, 32] in [-1, 1]: the training set. Sigma is uniform, shifted by 3 like sampling's.
    """
    torch.manual_seed(seed)
    captions = [scene.caption for scene in scenes]
    clip_tokens, t5_tokens = clip_tokenizer(), t5_tokenizer()
    clip = CLIPTextModel(
        CLIPTextConfig(
            vocab_size=len(clip_tokens), hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=2,
            projection_dim=64, max_position_embeddings=CLIP_LENGTH,
            bos_token_id=clip_tokens.bos_token_id, eos_token_id=clip_tokens.eos_token_id,
        )
    )  # fmt: skip
    t5 = T5EncoderModel(
        T5Config(vocab_size=len(t5_tokens), d_model=64, d_ff=128, d_kv=32, num_layers=2, num_heads=2, dropout_rate=0)
    )
    transformer = FluxTransformer2DModel(
        in_channels=32, num_layers=2, num_single_layers=2, attention_head_dim=32, num_attention_heads=4,
        joint_attention_dim=64, pooled_projection_dim=64, guidance_embeds=True, axes_dims_rope=(8, 12, 12),
    )  # fmt: skip
    for name, parameter in transformer.named_parameters():  # DiT's start: every block is the identity, the output zero
        if "norm" in name and "linear" in name or name.startswith("proj_out"):
            torch.nn.init.zeros_(parameter)

    latents = (encode(vae, images) - vae.config.shift_factor) * vae.config.scaling_factor
    latents = FluxPipeline._pack_latents(latents, *latents.shape)  # [N, 16, 32]
    clip_ids = clip_tokens(captions, padding="max_length", return_tensors="pt").input_ids
    t5_ids = t5_tokens(captions, padding="max_length", max_length=T5_LENGTH, return_tensors="pt").input_ids
    image_ids = FluxPipeline._prepare_latent_image_ids(1, 4, 4, "cpu", torch.float32)
    text_ids = torch.zeros(T5_LENGTH, 3)
    generator = torch.Generator().manual_seed(seed)
    parts = torch.nn.ModuleDict({"transformer": transformer, "clip": clip, "t5": t5})
    average = copy.deepcopy(parts).requires_grad_(False)

    def loss_of(indices):
        clean = latents[indices]
        noise = torch.randn(clean.shape, generator=generator)
        sigma = torch.rand(len(clean), generator=generator)
        sigma = 3 * sigma / (1 + 2 * sigma)
        velocity = transformer(
            hidden_states=torch.lerp(clean, noise, sigma[:, None, None]),
            timestep=sigma,
            guidance=torch.full_like(sigma, GUIDANCE),
            pooled_projections=clip(clip_ids[indices]).pooler_output,
            encoder_hidden_states=t5(t5_ids[indices]).last_hidden_state,
            txt_ids=text_ids,
            img_ids=image_ids,
            return_dict=False,
        )[0]
        with torch.no_grad():
            torch._foreach_lerp_(list(average.parameters()), list(parts.parameters()), 1 - EMA_DECAY)
        return F.mse_loss(velocity, noise - clean)

    loss = fit([parts], loss_of, how, generator, len(latents), "flux")
    pipeline = FluxPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=vae,
        text_encoder=average["clip"].eval(),
        tokenizer=clip_tokens,
        text_encoder_2=average["t5"].eval(),
        tokenizer_2=t5_tokens,
        transformer=average["transformer"].eval(),
    )
    return pipeline, {"loss": loss, "parameters": transformer.num_parameters()}
