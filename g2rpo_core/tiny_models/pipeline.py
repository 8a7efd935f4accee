"""Train the tiny text-to-image model, a pipeline of a published base model's classes."""

import copy
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from diffusers import (
    AutoencoderKL,
    DiffusionPipeline,
    FlowMatchEulerDiscreteScheduler,
    FluxPipeline,
    FluxTransformer2DModel,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
)
from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution
from diffusers.models.modeling_utils import ModelMixin
from torch.utils._pytree import tree_map_only
from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTextModelWithProjection,
    T5Config,
    T5EncoderModel,
)

from g2rpo_core.tasks.task import Task
from g2rpo_core.tiny_models.fit import fit
from g2rpo_core.tiny_models.settings import TOKEN, FitSettings, TransformerSize, VaeSize
from g2rpo_core.tiny_models.tokenizers import CLIP_LENGTH, T5_LENGTH, clip_tokenizer, t5_tokenizer

SMALL_VAE = {
    "layers_per_block": 1, "latent_channels": 8, "norm_num_groups": 8,
    "down_block_types": ("DownEncoderBlock2D",) * 3, "up_block_types": ("UpDecoderBlock2D",) * 3,
    "use_quant_conv": False, "use_post_quant_conv": False, "mid_block_add_attention": False,
}  # fmt: skip
# weights that are zero at first, as DiT's: every block is then the identity, and the output zero
ZEROS = re.compile(r"norm.*linear|modulation|_mod\.|^proj_out|final_layer.*\.linear")
KL_WEIGHT = 1e-6
LOG_VARIANCE = -4.0  # of the latents at first; at 0, noise would hide them for hundreds of steps
EMA_DECAY = 0.99
GUIDANCE = 3.5  # an input of FLUX.1-dev; the tiny one is trained at this value alone
DROPPED = 0.1  # share of captions that Stable Diffusion 3 learns as the empty prompt, for guidance
WIDTH = 64  # of T5; Stable Diffusion 3's two CLIPs fill it side by side


def quieted(vae: ModelMixin, last: torch.nn.Module) -> ModelMixin:
    """Initialize a VAE with little noise, and residual blocks as the identity: half the steps.

    last: the layer that makes the moments.
    """
    for name, parameter in vae.named_parameters():
        if "resnets" in name and "conv2" in name:
            torch.nn.init.zeros_(parameter)
    torch.nn.init.constant_(last.bias[len(last.bias) // 2 :], LOG_VARIANCE)
    return vae


class TinyVae:
    """A small AutoencoderKL, and what a VAE of another class does in another way."""

    @staticmethod
    def make(side: int, size: VaeSize) -> ModelMixin:
        """Make a VAE with 8 latent channels for images of that side, at a quarter of it."""
        vae = AutoencoderKL(sample_size=side, **vae_config(size))
        return quieted(vae, vae.encoder.conv_out)

    @staticmethod
    def encode(vae: ModelMixin, images: torch.Tensor) -> DiagonalGaussianDistribution:
        """Encode images [N, 3, size, size]."""
        return vae.encode(images).latent_dist

    @staticmethod
    def decode(vae: ModelMixin, latents: torch.Tensor) -> torch.Tensor:
        """Decode latents, not normalized."""
        return vae.decode(latents).sample

    @staticmethod
    def measure(vae: ModelMixin, latents: torch.Tensor) -> None:
        """Write the statistics of latents where the published VAE has them."""
        vae.register_to_config(
            shift_factor=latents.mean().item(), scaling_factor=1 / latents.std().item()
        )

    @staticmethod
    def normalize(vae: ModelMixin, latents: torch.Tensor) -> torch.Tensor:
        """Normalize latents by those statistics, in the shape in which the pipeline draws noise."""
        return (latents - vae.config.shift_factor) * vae.config.scaling_factor


def train_vae(
    images: torch.Tensor,
    settings: FitSettings,
    seed: int,
    kind: type[TinyVae] = TinyVae,
    size: VaeSize = VaeSize(),  # noqa: B008
) -> tuple[ModelMixin, dict]:
    """Train a VAE of a kind on images [N, 3, side, side] in [-1, 1], on their device.

    It holds the mean and the standard deviation of the latents, like the published ones.
    """
    torch.manual_seed(seed)
    vae = kind.make(images.shape[-1], size).to(images.device)
    generator = torch.Generator(images.device).manual_seed(seed)

    def compute_loss(indices):
        batch = images[indices]
        posterior = kind.encode(vae, batch)
        decoded = kind.decode(vae, posterior.sample(generator))
        return (
            F.l1_loss(decoded, batch)
            + F.mse_loss(decoded, batch)
            + KL_WEIGHT * posterior.kl().mean()
        )

    loss = fit([vae], compute_loss, settings, generator, len(images), "vae")
    vae.eval()
    kind.measure(vae, encode(kind, vae, images[:2048]))
    return vae, {"loss": loss}


@torch.no_grad()
def encode(kind: type[TinyVae], vae: ModelMixin, images: torch.Tensor) -> torch.Tensor:
    """Return the means of the latents, [N, 8, size / 4, size / 4], not normalized yet."""
    return torch.cat([kind.encode(vae, batch).mean for batch in images.split(256)])


class TinyBase(ABC):
    """A tiny base model, not trained yet; a prompt is the index of its text."""

    parts: torch.nn.ModuleDict
    """`transformer` and the text encoders, all trained, in the optimizers' order of parameters."""
    vae: type[TinyVae] = TinyVae
    scheduler: Mapping[str, Any] = {"shift": 3.0}

    @abstractmethod
    def __init__(self, task: Task, captions: list[str]):
        """Make the model for captions of a task."""

    def to(self, device: torch.device) -> None:
        """Move the parts, and all attributes that are tensors or mappings of them."""
        self.parts.to(device)
        for name, value in vars(self).items():
            if name != "parts":
                setattr(
                    self, name, tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), value)
                )

    def pack(self, latents: torch.Tensor) -> torch.Tensor:
        """Bring normalized latents into the shape that the transformer takes."""
        return latents

    @abstractmethod
    def velocity(
        self,
        latents: torch.Tensor,
        sigma: torch.Tensor,
        prompt: torch.Tensor,
        generator: torch.Generator,
    ) -> torch.Tensor:
        """Call the transformer with gradients for all parts; generator: for training's dropout."""

    @abstractmethod
    def pipeline(self, parts: torch.nn.ModuleDict, **others: object) -> DiffusionPipeline:
        """Put trained parts and their tokenizers into a pipeline; others: VAE and scheduler."""


class WithT5(TinyBase):
    """A tiny base model whose text encoders are CLIPs and T5."""

    def __init__(self, task: Task, texts: list[str]):
        self.clip_tokens, self.t5_tokens = clip_tokenizer(), t5_tokenizer(task)
        self.clip_ids = self.clip_tokens(texts, padding="max_length", return_tensors="pt").input_ids
        self.t5_ids = self.t5_tokens(
            texts, padding="max_length", max_length=T5_LENGTH, return_tensors="pt"
        ).input_ids

    def clip_config(self, width: int, layers: int) -> CLIPTextConfig:
        return CLIPTextConfig(
            vocab_size=len(self.clip_tokens),
            hidden_size=width,
            intermediate_size=128,
            num_hidden_layers=layers,
            num_attention_heads=2,
            projection_dim=width,
            max_position_embeddings=CLIP_LENGTH,
            bos_token_id=self.clip_tokens.bos_token_id,
            eos_token_id=self.clip_tokens.eos_token_id,
        )

    def t5(self) -> T5EncoderModel:
        return T5EncoderModel(
            T5Config(
                vocab_size=len(self.t5_tokens),
                d_model=WIDTH,
                d_ff=128,
                d_kv=32,
                num_layers=2,
                num_heads=2,
                dropout_rate=0,
            )
        )


def initialize(transformer: torch.nn.Module) -> None:
    """Initialize as DiT does, by ZEROS."""
    for name, parameter in transformer.named_parameters():
        if ZEROS.search(name):
            torch.nn.init.zeros_(parameter)


def flux_config(size: TransformerSize) -> dict[str, Any]:
    """Return a small FLUX.1's configuration, with the published proportions of its positions."""
    place = 3 * size.head_width // 8
    return {
        "in_channels": 32,
        "num_layers": size.blocks,
        "num_single_layers": size.single_blocks,
        "attention_head_dim": size.head_width,
        "num_attention_heads": size.heads,
        "joint_attention_dim": WIDTH,
        "pooled_projection_dim": 64,
        "guidance_embeds": True,
        "axes_dims_rope": (size.head_width // 4, place, place),
    }


def vae_config(size: VaeSize) -> dict[str, Any]:
    """Return the configuration of a small AutoencoderKL, but for the side of its images."""
    return {**SMALL_VAE, "block_out_channels": size.channels}


class TinyFlux(WithT5):
    """A small FLUX.1-dev."""

    def __init__(
        self,
        task: Task,
        captions: list[str],
        size: TransformerSize = TransformerSize(),  # noqa: B008
    ):
        super().__init__(task, captions)
        clip, t5 = CLIPTextModel(self.clip_config(64, 1)), self.t5()
        transformer = FluxTransformer2DModel(**flux_config(size))
        initialize(transformer)
        self.parts = torch.nn.ModuleDict({"transformer": transformer, "clip": clip, "t5": t5})
        tokens = task.size // TOKEN
        self.image_ids = FluxPipeline._prepare_latent_image_ids(
            1, tokens, tokens, "cpu", torch.float32
        )
        self.text_ids = torch.zeros(T5_LENGTH, 3)

    def pack(self, latents: torch.Tensor) -> torch.Tensor:
        """Pack [N, 8, rows, columns] into [N, rows * columns / 4, 32]."""
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


class TinyStableDiffusion3(WithT5):
    """A small Stable Diffusion 3.5: Medium's dual attention (first block), normalized Q and K."""

    def __init__(self, task: Task, captions: list[str]):
        super().__init__(task, [*captions, ""])  # the last one is the empty prompt
        clips = {
            name: CLIPTextModelWithProjection(self.clip_config(WIDTH // 2, 2))
            for name in ("clip_l", "clip_g")
        }
        t5 = self.t5()
        transformer = SD3Transformer2DModel(
            sample_size=task.size // TOKEN * 2,
            patch_size=2,
            in_channels=8,
            out_channels=8,
            num_layers=4,
            attention_head_dim=32,
            num_attention_heads=4,
            joint_attention_dim=WIDTH,
            caption_projection_dim=128,
            pooled_projection_dim=WIDTH,
            pos_embed_max_size=task.size // TOKEN * 2,
            dual_attention_layers=(0,),
            qk_norm="rms_norm",
        )
        initialize(transformer)
        self.parts = torch.nn.ModuleDict({"transformer": transformer, **clips, "t5": t5})

    def velocity(self, latents, sigma, prompt, generator):
        """Encode prompts as `StableDiffusion3Pipeline.encode_prompt` and call the transformer.

        The share DROPPED of them is replaced by the empty prompt.
        """
        dropped = torch.rand(len(prompt), generator=generator, device=prompt.device) < DROPPED
        prompt = prompt.masked_fill(dropped, len(self.clip_ids) - 1)
        clips = [
            self.parts[name](self.clip_ids[prompt], output_hidden_states=True)
            for name in ("clip_l", "clip_g")
        ]
        context = torch.cat([clip.hidden_states[-2] for clip in clips], -1)
        context = F.pad(context, (0, WIDTH - context.shape[-1]))
        return self.parts["transformer"](
            hidden_states=latents,
            timestep=1000 * sigma,
            pooled_projections=torch.cat([clip.text_embeds for clip in clips], -1),
            encoder_hidden_states=torch.cat(
                [context, self.parts["t5"](self.t5_ids[prompt]).last_hidden_state], 1
            ),
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


def train_pipeline(
    build: Callable[[Task, list[str]], TinyBase],
    task: Task,
    vae: ModelMixin,
    captions: list[str],
    images: torch.Tensor,
    settings: FitSettings,
    seed: int,
) -> tuple[DiffusionPipeline, dict]:
    """Train transformer and text encoders by flow matching; return a pipeline and its quality.

    The pipeline has averaged weights. build: makes the model for captions of a task, after
    `torch.manual_seed`; captions, images [N, 3, size, size] in [-1, 1]: the training set, on the
    device to train on. Sigma is uniform, shifted by 3 like sampling's.
    """
    torch.manual_seed(seed)
    base = build(task, captions)
    base.to(images.device)
    parts = base.parts
    latents = base.pack(base.vae.normalize(vae, encode(base.vae, vae, images)))
    generator = torch.Generator(images.device).manual_seed(seed)
    average = copy.deepcopy(parts).requires_grad_(False)

    def compute_loss(indices):
        clean = latents[indices]
        noise = torch.randn(clean.shape, generator=generator, device=clean.device)
        sigma = torch.rand(len(clean), generator=generator, device=clean.device)
        sigma = 3 * sigma / (1 + 2 * sigma)
        noisy = torch.lerp(clean, noise, sigma.view(-1, *[1] * (clean.ndim - 1)))
        velocity = base.velocity(noisy, sigma, indices, generator)
        with torch.no_grad():
            torch._foreach_lerp_(
                list(average.parameters()), list(parts.parameters()), 1 - EMA_DECAY
            )
        return F.mse_loss(velocity, noise - clean)

    loss = fit([parts], compute_loss, settings, generator, len(latents), "transformer")
    pipeline = base.pipeline(
        average.eval(), vae=vae, scheduler=FlowMatchEulerDiscreteScheduler(**base.scheduler)
    )
    return pipeline, {"loss": loss, "parameters": parts["transformer"].num_parameters()}
