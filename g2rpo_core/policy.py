"""FLUX as a velocity field: load, evaluate under a batch of prompts, decode to pictures, save."""

import copy
from pathlib import Path

import torch
from diffusers import AutoencoderKL, FluxPipeline, FluxTransformer2DModel

from .embeddings import Conditioning
from .rollout import Velocity


class Policy:
    """A FLUX transformer and its VAE at one picture size.

    height, width: pixels, divisible by twice the VAE's factor (ValueError otherwise); guidance: FLUX.1-dev's guidance scale;
    dtype: of the transformer's computation (autocast), weights, latents and velocities stay float32.
    """

    def __init__(
        self,
        transformer: FluxTransformer2DModel,
        vae: AutoencoderKL,
        height: int,
        width: int,
        guidance: float,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ):
        self.transformer, self.vae = transformer.to(device), vae.to(device).eval().requires_grad_(False)
        self.height, self.width, self.guidance, self.dtype, self.device = height, width, guidance, dtype, torch.device(device)
        self.vae_factor = 2 ** (len(vae.config.block_out_channels) - 1)
        if height % (2 * self.vae_factor) or width % (2 * self.vae_factor):
            raise ValueError(f"height and width must be divisible by {2 * self.vae_factor}, got {height}x{width}")
        rows, columns = height // self.vae_factor, width // self.vae_factor
        self.unpacked_shape = (vae.config.latent_channels, rows, columns)
        self.image_tokens = rows * columns // 4
        self._base: FluxTransformer2DModel | None = None
        self._image_ids = FluxPipeline._prepare_latent_image_ids(1, rows // 2, columns // 2, device, torch.float32)

    @classmethod
    def load(cls, pipeline: Path, transformer: Path | None = None, **settings) -> "Policy":
        """From a FluxPipeline folder; `transformer` is a folder with trained weights that replace the base's."""
        weights = FluxTransformer2DModel.from_pretrained(transformer or pipeline / "transformer", dtype=torch.float32)
        vae = AutoencoderKL.from_pretrained(pipeline / "vae", dtype=torch.float32)
        return cls(weights, vae, **settings)

    def save(self, folder: Path) -> None:
        """Writes the transformer as `FluxTransformer2DModel.from_pretrained` reads it."""
        self.transformer.save_pretrained(folder)

    def noise(self, generator: torch.Generator, count: int | None = None) -> torch.Tensor:
        """Packed standard normal latents [tokens, channels], or [count, tokens, channels]; drawn as diffusers draws them."""
        unpacked = torch.randn((count or 1, *self.unpacked_shape), generator=generator)
        packed = FluxPipeline._pack_latents(unpacked, *unpacked.shape).to(self.device)
        return packed if count else packed[0]

    def batch_size(self, tokens: int, conditioning: Conditioning) -> int:
        """How many latents of these prompts make a call of at most `tokens` picture and text tokens; at least 1."""
        return max(1, tokens // (self.image_tokens + conditioning.context.shape[1]))

    def keep_base(self) -> None:
        """Keeps a copy of the transformer as it is now, for `base_velocity`: a second set of weights in memory."""
        self._base = copy.deepcopy(self.transformer).eval().requires_grad_(False)

    def base_velocity(self, conditioning: Conditioning) -> Velocity:
        """The velocity field of the model that `keep_base` kept."""
        return self._velocity(self._base, conditioning)

    def velocity(self, conditioning: Conditioning) -> Velocity:
        """The velocity field under P encoded prompts; sigma goes to the model exactly, not rounded to 1/1000."""
        return self._velocity(self.transformer, conditioning)

    def _velocity(self, transformer: FluxTransformer2DModel, conditioning: Conditioning) -> Velocity:
        context, pooled = conditioning.context.to(self.device), conditioning.pooled.to(self.device)
        text_ids = torch.zeros(context.shape[1], 3, device=self.device)

        def velocity(latents: torch.Tensor, sigma: torch.Tensor, prompt: torch.Tensor) -> torch.Tensor:
            with torch.autocast(self.device.type, self.dtype, enabled=self.dtype != torch.float32):
                output = transformer(
                    hidden_states=latents,
                    timestep=sigma,  # the model multiplies by 1000 itself
                    guidance=torch.full_like(sigma, self.guidance) if transformer.config.guidance_embeds else None,
                    pooled_projections=pooled[prompt],
                    encoder_hidden_states=context[prompt],
                    txt_ids=text_ids,
                    img_ids=self._image_ids,
                    return_dict=False,
                )[0]
            return output.float()

        return velocity

    @torch.no_grad()
    def decode(self, latents: torch.Tensor, max_batch: int) -> torch.Tensor:
        """Packed clean latents [N, tokens, channels] -> pictures [N, 3, height, width], float32 in [0, 1]."""
        latents = FluxPipeline._unpack_latents(latents, self.height, self.width, self.vae_factor)
        latents = latents / self.vae.config.scaling_factor + self.vae.config.shift_factor
        pictures = [self.vae.decode(part, return_dict=False)[0] for part in latents.split(max_batch)]
        return (torch.cat(pictures) / 2 + 0.5).clamp(0, 1)
