"""FLUX as a velocity field: load, evaluate under a batch of prompts, decode to pictures, save."""

import copy
from pathlib import Path

import torch
from diffusers import AutoencoderKL, FluxPipeline, FluxTransformer2DModel
from peft import LoraConfig
from peft.utils import get_peft_model_state_dict

from .config import Adapter
from .embeddings import Conditioning
from .rollout import Velocity

LORA_FILE = "pytorch_lora_weights.safetensors"  # diffusers' name


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
    def load(cls, pipeline: Path, run: Path | None = None, adapter: Adapter | None = None, **settings) -> "Policy":
        """From a FluxPipeline folder.

        run: folder that `save` wrote, whose weights replace the base's or whose adapter is laid over them; adapter: a new one, which
        alone is then trained. With an adapter the base's weights are frozen and kept in the computation's dtype.
        """
        lora = run / "lora" if run and (run / "lora").exists() else None
        dtype = settings.get("dtype", torch.float32) if lora or adapter else torch.float32
        trained = run / "transformer" if run and not lora else pipeline / "transformer"
        weights = FluxTransformer2DModel.from_pretrained(trained, dtype=dtype)
        vae = AutoencoderKL.from_pretrained(pipeline / "vae", dtype=torch.float32)
        if lora:
            weights.load_lora_adapter(lora, weight_name=LORA_FILE, prefix="transformer")
        elif adapter:
            weights.requires_grad_(False)
            weights.add_adapter(
                LoraConfig(
                    r=adapter.rank, lora_alpha=adapter.alpha, target_modules=list(adapter.targets), init_lora_weights="gaussian"
                )
            )
            for parameter in weights.parameters():
                if parameter.requires_grad:
                    parameter.data = parameter.data.float()
        return cls(weights, vae, **settings)

    @property
    def has_adapter(self) -> bool:
        return bool(getattr(self.transformer, "peft_config", None))

    def trained_parameters(self) -> dict[str, torch.nn.Parameter]:
        """The parameters that training moves, by name: the adapter's, or all."""
        return {name: parameter for name, parameter in self.transformer.named_parameters() if parameter.requires_grad}

    def save(self, folder: Path) -> None:
        """Writes `folder`/transformer for `FluxTransformer2DModel.from_pretrained`, or `folder`/lora for `load_lora_weights`."""
        if not self.has_adapter:
            self.transformer.save_pretrained(folder / "transformer")
            return
        FluxPipeline.save_lora_weights(
            folder / "lora",
            transformer_lora_layers=get_peft_model_state_dict(self.transformer),
            weight_name=LORA_FILE,
            transformer_lora_adapter_metadata=self.transformer.peft_config["default"].to_dict(),
        )

    def noise(self, generator: torch.Generator, count: int | None = None) -> torch.Tensor:
        """Packed standard normal latents [tokens, channels], or [count, tokens, channels]; drawn as diffusers draws them."""
        unpacked = torch.randn((count or 1, *self.unpacked_shape), generator=generator)
        packed = FluxPipeline._pack_latents(unpacked, *unpacked.shape).to(self.device)
        return packed if count else packed[0]

    def batch_size(self, tokens: int, conditioning: Conditioning) -> int:
        """How many latents of these prompts make a call of at most `tokens` picture and text tokens; at least 1."""
        return max(1, tokens // (self.image_tokens + conditioning.context.shape[1]))

    def keep_base(self) -> None:
        """Keeps the transformer as it is now for `base_velocity`: a second set of weights, but under an adapter nothing at all."""
        if not self.has_adapter:
            self._base = copy.deepcopy(self.transformer).eval().requires_grad_(False)

    def base_velocity(self, conditioning: Conditioning) -> Velocity:
        """The velocity field of the model that `keep_base` kept, or of the one under the adapter."""
        if not self.has_adapter:
            return self._velocity(self._base, conditioning)
        adapted = self._velocity(self.transformer, conditioning)

        def base(*arguments: torch.Tensor) -> torch.Tensor:
            self.transformer.disable_adapters()
            try:
                return adapted(*arguments)
            finally:
                self.transformer.enable_adapters()

        return base

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
