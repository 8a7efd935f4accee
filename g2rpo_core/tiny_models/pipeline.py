"""The tiny text-to-image model: a pipeline of the published classes of a base model, trained here on a world's pictures."""

import copy
from collections.abc import Callable
from typing import Protocol

import torch
import torch.nn.functional as F
from diffusers import AutoencoderKL, DiffusionPipeline, FlowMatchEulerDiscreteScheduler

from g2rpo_core.tiny_models.fit import fit
from g2rpo_core.tiny_models.settings import FitSettings
from g2rpo_core.worlds.world import World

KL_WEIGHT = 1e-6
LOG_VARIANCE = -4.0  # of the latents before the VAE has learned any: at 0 its noise would hide them for hundreds of steps
EMA_DECAY = 0.99


def train_vae(images: torch.Tensor, how: FitSettings, seed: int) -> tuple[AutoencoderKL, dict]:
    """AutoencoderKL with 8 latent channels at a quarter of the size, for square images [N, 3, size, size] in [-1, 1].

    Its config holds the mean and the standard deviation of the latents as shift and scaling factor, like the published ones.
    """
    torch.manual_seed(seed)
    vae = AutoencoderKL(
        sample_size=images.shape[-1], block_out_channels=(16, 32, 32), layers_per_block=1, latent_channels=8, norm_num_groups=8,
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
    """Means of the latents, [N, 8, size / 4, size / 4], not yet shifted or scaled."""
    return torch.cat([vae.encode(batch).latent_dist.mean for batch in images.split(256)])


class Small(Protocol):
    """A tiny base model, not trained yet; a prompt is the index of its caption.

    parts: what is trained: `transformer` and the text encoders, in the order in which the optimizers have their parameters.
    """

    parts: torch.nn.ModuleDict

    def pack(self, latents: torch.Tensor) -> torch.Tensor:
        """Latents of the VAE as the transformer takes them."""

    def velocity(
        self, latents: torch.Tensor, sigma: torch.Tensor, prompt: torch.Tensor, generator: torch.Generator
    ) -> torch.Tensor:
        """The transformer's, with gradients for all parts; generator: of whatever else is random in training."""

    def pipeline(self, parts: torch.nn.ModuleDict, **others: object) -> DiffusionPipeline:
        """The pipeline of trained parts, with their tokenizers; others: VAE and scheduler."""


def initialize(transformer: torch.nn.Module) -> None:
    """DiT's start: every block is the identity, the output zero."""
    for name, parameter in transformer.named_parameters():
        if "norm" in name and "linear" in name or name.startswith("proj_out"):
            torch.nn.init.zeros_(parameter)


def train_pipeline(
    build: Callable[[World, list[str]], Small],
    world: World,
    vae: AutoencoderKL,
    captions: list[str],
    images: torch.Tensor,
    how: FitSettings,
    seed: int,
) -> tuple[DiffusionPipeline, dict]:
    """Transformer and text encoders trained together by flow matching, as an averaged pipeline.

    build: makes the model for captions of a world, after `torch.manual_seed`; captions, images [N, 3, size, size] in [-1, 1]: the
    training set. Sigma is uniform, shifted by 3 like sampling's.
    """
    torch.manual_seed(seed)
    small = build(world, captions)
    parts = small.parts
    latents = small.pack((encode(vae, images) - vae.config.shift_factor) * vae.config.scaling_factor)
    generator = torch.Generator().manual_seed(seed)
    average = copy.deepcopy(parts).requires_grad_(False)

    def loss_of(indices):
        clean = latents[indices]
        noise = torch.randn(clean.shape, generator=generator)
        sigma = torch.rand(len(clean), generator=generator)
        sigma = 3 * sigma / (1 + 2 * sigma)
        noisy = torch.lerp(clean, noise, sigma.view(-1, *[1] * (clean.ndim - 1)))
        velocity = small.velocity(noisy, sigma, indices, generator)
        with torch.no_grad():
            torch._foreach_lerp_(list(average.parameters()), list(parts.parameters()), 1 - EMA_DECAY)
        return F.mse_loss(velocity, noise - clean)

    loss = fit([parts], loss_of, how, generator, len(latents), "transformer")
    pipeline = small.pipeline(average.eval(), vae=vae, scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0))
    return pipeline, {"loss": loss, "parameters": parts["transformer"].num_parameters()}
