"""A base model as a policy: loads it, gives its velocity field, decodes its latents, saves it."""

import copy
import json
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import torch.distributed as dist
from diffusers.models.modeling_utils import ModelMixin
from diffusers.utils.peft_utils import scale_lora_layers, unscale_lora_layers
from peft import LoraConfig, get_peft_model_state_dict
from torch.distributed.tensor import DTensor

from g2rpo_core.architectures.architecture import MASK, Architecture
from g2rpo_core.architectures.table import (
    check_sampling,
    read_architecture,
    read_scheduler,
    read_trainable,
)
from g2rpo_core.data.embeddings import DTYPES, Conditioning
from g2rpo_core.distributed.process_group import ALONE, ProcessGroup
from g2rpo_core.foundation.errors import UserError
from g2rpo_core.foundation.layout import hint_for
from g2rpo_core.foundation.permissions import share_weights
from g2rpo_core.hub.pretrained import load_whole
from g2rpo_core.models.loading import (
    allocate,
    apply_compile,
    check_attention,
    draw_lora,
    empty_transformer,
    load_lora,
    load_transformer,
    lora_config,
    parallelize,
    read_lora,
    refresh,
    reshard,
    use_attention,
)
from g2rpo_core.models.quantized import Kind
from g2rpo_core.models.settings import LoraSettings, ParallelSettings
from g2rpo_core.numerics.cuda import WITHOUT_BACKWARD
from g2rpo_core.sampling.rollout import Velocity
from g2rpo_core.sampling.seeding import generator
from g2rpo_core.weights.adapter import LORA_FILE, Matrices, merge, set_values
from g2rpo_core.weights.stored import weights_in

SNAPSHOTS = "snapshots"  # the folder, within a run's, with the weights of earlier iterations


def snapshot(run: Path, checkpoint: str | int) -> Path:
    """Return the folder of a run's weights for `Policy.load`: `final`, or those of an iteration."""
    return run if checkpoint == "final" else run / SNAPSHOTS / f"{checkpoint:06d}"


class Policy:
    """A base model's transformer and VAE at one image size.

    height, width: pixels, divisible by twice the VAE's factor (UserError otherwise); guidance: the
    scale, an input of the model or that of classifier-free guidance; dtype: of the transformer's
    computation (autocast), while weights, latents and velocities stay float32; attention: the
    backend of diffusers that all calls take (`use_attention`); quantize: how frozen weights are
    kept (`models/quantized.py`); None: in the computation's dtype.
    """

    def __init__(
        self,
        architecture: Architecture,
        transformer: ModelMixin,
        vae: ModelMixin,
        height: int,
        width: int,
        guidance: float,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        attention: str | None = None,
        quantize: Kind | None = None,
    ):
        self.architecture = architecture
        self.transformer, self.vae = transformer, vae.to(device).eval().requires_grad_(False)
        self.height, self.width, self.guidance = height, width, guidance
        self.dtype, self.device = dtype, torch.device(device)
        self.attention, self.quantize = attention, quantize
        # Before the check: a backend that this model cannot take has its own message
        use_attention(transformer, attention)
        self.check_attention(trained=False)
        self.vae_factor = architecture.vae_factor(vae.config)
        if height % (2 * self.vae_factor) or width % (2 * self.vae_factor):
            raise UserError(
                f"height and width of images must be divisible by {2 * self.vae_factor}, "
                f"got {height}x{width}"
            )
        longest = architecture.longest_side(transformer.config)
        if longest and max(height, width) > longest * self.vae_factor:
            raise UserError(
                f"height and width of images are at most {longest * self.vae_factor} "
                f"for this {architecture.label}, got {height}x{width}"
            )
        self.rows, self.columns = height // self.vae_factor, width // self.vae_factor
        self.unpacked_shape = architecture.latent_shape(vae.config, self.rows, self.columns)
        self.image_tokens = self.rows * self.columns // 4
        self._base: ModelMixin | None = None
        # Of a LoRA that training goes on from, for `base_velocity`
        self._start: list[torch.Tensor] | None = None
        self._replica: ModelMixin | None = None
        self._positions = architecture.positions(self.rows, self.columns, self.device)

    @classmethod
    def load(cls, pipeline: Path, run: Path | None = None, **settings) -> "Policy":
        """Load a policy to sample from: weights without gradients, in the dtype of the computation.

        pipeline: the folder of a base model's pipeline; run: a folder for `weights_in`, whose
        weights replace the base's or whose LoRA is added to them; settings: those of Policy.
        UserError if the files do not hold the model's weights, or as `check_sampling`.
        """
        check_sampling(pipeline, settings["guidance"])
        device = torch.device(settings.get("device", "cpu"))
        architecture, base = read_architecture(pipeline), pipeline / "transformer"
        place, lora = weights_in(run) if run else (base, False)
        weights = base if lora else place
        home = weights if weights.is_dir() else weights.parent
        # Weights from elsewhere may be one file: the configuration is then the base model's
        config = home if (home / "config.json").exists() else base
        transformer = load_transformer(
            architecture,
            weights,
            device,
            settings.get("dtype", torch.float32),
            trained=False,
            config=config,
            quantized=settings.get("quantize"),
        )
        if lora:
            # Added, not merged: who draws images may choose its strength
            load_lora(architecture, transformer, place)
        vae = load_whole(architecture.vae, pipeline / "vae", dtype=torch.float32)
        return cls(architecture, transformer, vae, **settings)

    @classmethod
    def load_to_train(
        cls,
        pipeline: Path,
        lora: LoraSettings | None = None,
        seed: int = 0,
        parallel: ParallelSettings = ParallelSettings(),  # noqa: B008
        processes: ProcessGroup = ALONE,
        base: bool = False,
        start: Path | None = None,
        **settings,
    ) -> "Policy":
        """Load a policy to train, spread over the processes as `parallel` says; collective.

        All weights are float32 and trained. With a LoRA, only the LoRA is: its initial values
        depend on `seed` alone, and the base's weights stay in the computation's dtype. base: also
        keep the model before training, for `base_velocity`; without a LoRA this is a second set of
        weights, in the computation's dtype. start: weights in place of the base's, or a LoRA that
        is merged into them or gives a new LoRA its values; then this is the model before training.
        """
        if (backend := settings.get("attention")) in WITHOUT_BACKWARD:
            raise UserError(
                f"sampling.attention: nothing is trained with {backend}, "
                "whose gradients are not numbers (numerics/cuda.py): set it to null"
            )
        # The trained weights, or a new LoRA on frozen ones
        device = torch.device(settings.get("device", "cpu"))
        dtype = settings.get("dtype", torch.float32)
        architecture, folder = read_trainable(pipeline), pipeline / "transformer"
        read_scheduler(pipeline)  # of the images that judge the run
        place, of_lora = _start_of(start, lora) if start else (folder, False)
        # Spread while it has no data: no process ever holds the whole model
        spread = lambda transformer: parallelize(
            transformer, architecture.blocks(transformer), parallel, dtype, processes, device
        )
        load = partial(
            load_transformer,
            architecture,
            folder if of_lora else place,
            device,
            spread=spread,
            config=folder,
        )
        adapter = lora and lora_config(architecture, lora)
        kept, quantize = dtype if lora else torch.float32, settings.get("quantize")
        transformer = load(dtype=kept, trained=True, lora=adapter, quantized=quantize)
        started = read_lora(architecture, transformer, place) if of_lora else None
        _set_start(transformer, started, adapter, seed)
        vae = load_whole(architecture.vae, pipeline / "vae", dtype=torch.float32)
        policy = cls(architecture, transformer, vae, **settings)
        if base and not lora:
            policy._keep_reference(load(dtype=dtype, trained=False), started)
        elif base and started:  # a new LoRA at zero is the model before training already
            policy._start = _values(policy)
        if parallel.replica and processes.size > 1:
            replica = empty_transformer(architecture, folder, dtype, trained=False, lora=adapter)
            policy._keep_replica(replica.requires_grad_(False), dtype, device, parallel.compile)
        return policy

    def _keep_reference(self, reference: ModelMixin, started: dict[str, Matrices] | None) -> None:
        """Keep the model before training, in the computation's dtype: it only gives velocities."""
        if started:
            merge(reference, started)
        self._base = reference.eval()
        use_attention(reference, self.attention)

    def _keep_replica(
        self, replica: ModelMixin, dtype: torch.dtype, device: torch.device, compiled: bool
    ) -> None:
        """Keep an unsharded copy for rollouts."""
        # In the dtype of the computation, whole on every GPU: a rollout gathers nothing
        for parameter in replica.parameters():  # also the adapter's
            parameter.data = parameter.data.to(dtype)
        if compiled:
            apply_compile(self.architecture.blocks(replica))
        use_attention(replica, self.attention)
        allocate(replica, device)
        self._replica = replica
        self.refresh()

    @property
    def has_lora(self) -> bool:
        return bool(getattr(self.transformer, "peft_config", None))

    def check_attention(self, trained: bool) -> None:
        """Check that the chosen backend computes what the base model needs, and its gradients."""
        if self.attention is not None:
            masked = bool(self.architecture.padded)
            check_attention(self.attention, self.device, self.dtype, masked=masked, trained=trained)

    def trained_parameters(self) -> dict[str, torch.nn.Parameter]:
        """Return the parameters that training moves, by name: the LoRA's, or all."""
        return {
            name: parameter
            for name, parameter in self.transformer.named_parameters()
            if parameter.requires_grad
        }

    def save(self, folder: Path, dtype: torch.dtype = torch.float32) -> None:
        """Save `folder`/transformer for `from_pretrained`, or `folder`/lora to `load_lora_weights`.

        Both are diffusers' forms. dtype: of the written weights. Collective: the first process
        writes, the others only help to gather what is sharded.
        """
        # Gather
        weights = {}
        # After a forward without gradients the root is gathered, in the computation's dtype
        reshard(self.transformer)
        rank = dist.get_rank() if dist.is_initialized() else 0
        for name, parameter in self.trained_parameters().items():
            # One parameter at a time: the first process holds the whole only on the CPU
            whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
            if rank == 0:
                weights[name] = whole.detach().to("cpu", dtype)
        if rank > 0:
            return
        # Write, a LoRA alone
        if self.has_lora:
            # diffusers' own metadata orders a set and two entries differently in every process
            about = {
                f"transformer.{key}": value
                for key, value in self.transformer.peft_config["default"].to_dict().items()
            }
            metadata = {
                "lora_adapter_metadata": json.dumps(about, default=sorted, sort_keys=True, indent=2)
            }
            self.architecture.pipeline.save_lora_weights(
                folder / "lora",
                transformer_lora_layers=get_peft_model_state_dict(self.transformer, weights),
                weight_name=LORA_FILE,
                save_function=lambda tensors, file: safetensors.torch.save_file(
                    tensors, file, metadata=metadata
                ),
            )
        # Or a model of the same configuration: the trained one may be sharded or compiled
        else:
            with torch.device("meta"):
                whole = self.architecture.transformer.from_config(self.transformer.config)
            # Whole on every process
            buffers = {name: buffer.cpu() for name, buffer in self.transformer.named_buffers()}
            whole.load_state_dict(weights | buffers, assign=True)
            whole.save_pretrained(folder / "transformer")
        share_weights(folder)

    def noise(
        self,
        generator: torch.Generator,
        count: int | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> torch.Tensor:
        """Draw standard normal latents [...] as the transformer takes them, or [count, ...].

        They are float32. dtype: in which they are drawn: a seed has other numbers in each.
        """
        # On the CPU, then packed: the same numbers as diffusers draws, on every device
        shape = (count or 1, *self.unpacked_shape)
        unpacked = torch.randn(shape, generator=generator, dtype=dtype)
        packed = self.architecture.pack(unpacked).to(self.device, torch.float32)
        return packed if count else packed[0]

    def cut(self, conditioning: Conditioning, processes: ProcessGroup = ALONE) -> Conditioning:
        """Cut the padding behind the longest of these prompts; drop the mask if none is shorter.

        Attention costs less without it. Collective: of all processes together, so that any number
        of them computes the same. Cut once for all that must compute alike, as a rollout and its
        update. Base models that attend to their padding keep it.
        """
        padded = self.architecture.padded
        negative = conditioning.negative if self.forward_evals > 1 else None
        # What attends to its padding was trained with it, and computes other images without
        if not padded or MASK not in conditioning.tensors:
            return conditioning
        own = [
            length
            for each in (conditioning.tensors, negative)
            if each
            for length in self.architecture.lengths(each)
        ]
        # One length for all processes: a ratio is exactly 1 only between equal calls
        every = [length for of_process in processes.gather(own) for length in of_process]
        if not min(every):  # a text has tokens: a rehearsal has no data
            return conditioning
        cut = partial(self.architecture.cut, length=max(every))
        length = conditioning.length or self.architecture.text_tokens(conditioning.tensors)
        negative = cut(negative) if negative else conditioning.negative
        return Conditioning(cut(conditioning.tensors), negative, min(every) == max(every), length)

    def batch_size(self, tokens: int, conditioning: Conditioning) -> int:
        """Return how many latents of these prompts fit into a call of `tokens` tokens; at least 1.

        Tokens of image and text. Padding that was cut counts, so that the number is the same for
        all prompts and on all processes.
        """
        # Of the padded length: a batch of another size rounds differently
        of_one = self.image_tokens + (
            conditioning.length or self.architecture.text_tokens(conditioning.tensors)
        )
        return max(1, tokens // (of_one * self.forward_evals))

    @property
    def forward_evals(self) -> int:
        """Return the forward evaluations (NFE) per latent: two with classifier-free guidance."""
        return self.architecture.forward_evals(self.guidance)

    def keep_base(self) -> None:
        """Keep a copy of the transformer for `base_velocity`, once; a LoRA needs none."""
        if self._base is None and not self.has_lora:
            self._base = copy.deepcopy(self.transformer).eval().requires_grad_(False)

    def use_base(self, base: "Path | Policy") -> None:
        """Set the base for `base_velocity` of loaded weights: a pipeline's folder, or a policy.

        A LoRA's base is the same weights with the LoRA at zero, or with the initial values that a
        policy to train with a LoRA has.
        """
        if self.has_lora and isinstance(base, Policy) and base.has_lora:
            self._start = _values(base)
        if not self.has_lora:
            if isinstance(base, Path):
                loaded = load_transformer(
                    self.architecture,
                    base / "transformer",
                    self.device,
                    self.dtype,
                    trained=False,
                    quantized=self.quantize,
                )
                self._base = loaded.eval()
                use_attention(loaded, self.attention)
            else:
                self._base = base.transformer

    def base_velocity(self, conditioning: Conditioning) -> Velocity:
        """Return the velocity field of the model before training.

        A LoRA's is the same weights with the LoRA at zero, or as it began.
        """
        if not self.has_lora:
            return self._velocity(self._base, conditioning)
        adapted, transformer = self.velocity(conditioning), self.transformer

        def at_base(*arguments: torch.Tensor) -> torch.Tensor:
            with ExitStack() as back:
                if self._start:
                    back.callback(self._set_trained, _values(self))
                    self._set_trained(self._start)
                # Scaled to zero, DoRA keeps its magnitudes; to disable it switches requires_grad
                elif any(config.use_dora for config in transformer.peft_config.values()):
                    back.callback(transformer.enable_lora)
                    transformer.disable_lora()
                else:  # without a copy of its values
                    back.callback(unscale_lora_layers, transformer, 0.0)
                    scale_lora_layers(transformer, 0.0)
                return adapted(*arguments)

        return at_base

    def _set_trained(self, values: Sequence[torch.Tensor]) -> None:
        """Set the trained parameters, unseen by autograd.

        Any backward pass comes when they have their values again.
        """
        for parameter, value in zip(self.trained_parameters().values(), values):
            # data: an in-place change that autograd saw would forbid the backward pass
            parameter.data.copy_(value)

    def refresh(self) -> None:
        """Update the rollouts' replica of the weights, if there is one; collective."""
        if self._replica is not None:
            refresh(self._replica, self.transformer)

    def sampling_velocity(self, conditioning: Conditioning) -> Velocity:
        """Return the velocity field to sample with, without gradients: the replica's, if any."""
        return self._velocity(
            self._replica if self._replica is not None else self.transformer, conditioning
        )

    def velocity(self, conditioning: Conditioning) -> Velocity:
        """Return the velocity field under P encoded prompts; sigmas reach the model unchanged."""
        return self._velocity(self.transformer, conditioning)

    def _velocity(self, transformer: ModelMixin, conditioning: Conditioning) -> Velocity:
        # Check that the prompts were encoded for this model
        guided = self.forward_evals > 1
        if lacking := [
            name for name in self.architecture.encoding if name not in conditioning.tensors
        ]:
            raise self._not_encoded_for(f"their {', '.join(lacking)}")
        config, length = transformer.config, conditioning.tensors["context"].shape[1]
        for name, shape in self.architecture.encoding_shapes(config, length, 1).items():
            if (width := conditioning.tensors[name].shape[-1]) != shape[-1]:
                raise self._not_encoded_for(f"a {name} of width {shape[-1]} (theirs has {width})")
        if guided and conditioning.negative is None:
            raise self._not_encoded_for("the empty prompt, for classifier-free guidance")
        # Make the field
        names = [
            name for name in self.architecture.encoding if name != MASK or not conditioning.unpadded
        ]
        encoded = {name: conditioning.tensors[name].to(self.device) for name in names}
        negative = {
            name: tensor.to(self.device) for name, tensor in (conditioning.negative or {}).items()
        }
        guidance, positions = self.guidance, self._positions

        def velocity(
            latents: torch.Tensor, sigma: torch.Tensor, prompt: torch.Tensor
        ) -> torch.Tensor:
            # Encoded once a prompt and repeated here: an encoding for each latent would not fit
            rows = {name: tensor[prompt] for name, tensor in encoded.items()}
            if guided:  # both in one call, in diffusers' order
                latents, sigma = torch.cat([latents] * 2), torch.cat([sigma] * 2)
                rows = {
                    name: torch.cat([negative[name].expand_as(row), row])
                    for name, row in rows.items()
                }
            # Sigma, latents and velocity stay float32: bfloat16 tells only 8 bits of sigma apart
            with torch.autocast(self.device.type, self.dtype, enabled=self.dtype != torch.float32):
                output = self.architecture.velocity(
                    transformer, latents, sigma, rows, guidance, positions
                )
            if not guided:
                return output.float()
            without, with_prompt = output.float().chunk(2)
            return self.architecture.guided(without, with_prompt, guidance)

        return velocity

    def _not_encoded_for(self, lacking: str) -> UserError:
        return UserError(
            f"the encoded prompts lack {lacking}, which {self.architecture.label} needs: "
            f"they are of another model; {hint_for('embeddings')}"
        )

    @torch.no_grad()
    def decode(self, latents: torch.Tensor, max_batch: int) -> torch.Tensor:
        """Decode clean latents [N, ...] to images [N, 3, height, width], float32 in [0, 1]."""
        latents = self.architecture.unpack(latents, self.rows, self.columns)
        images = [self.architecture.decode(self.vae, part) for part in latents.split(max_batch)]
        # in place: a prompt's images are 1.7 GiB at 720 x 720
        return torch.cat(images).div_(2).add_(0.5).clamp_(0, 1)


def policy_settings(drawn: Mapping[str, Any], device: torch.device, **size: int) -> dict[str, Any]:
    """Return the settings of a Policy: `SamplingSettings.drawn`, and the size in pixels."""
    return {**drawn, "dtype": DTYPES[drawn["dtype"]], "device": device, **size}


def _values(policy: Policy) -> list[torch.Tensor]:
    """Copy the trained parameters."""
    return [parameter.detach().clone() for parameter in policy.trained_parameters().values()]


def _start_of(start: Path, lora: LoraSettings | None) -> tuple[Path, bool]:
    """Find the weights to start from, tell if they are a LoRA's; UserError if not for `lora`."""
    place, of_lora = weights_in(start)
    if lora and not of_lora:
        raise UserError(
            "training.start: are whole weights, and training.lora a LoRA on those of the base "
            "model: set it to null"
        )
    for home in place.parents[:2]:  # of a whole pipeline's
        if (home / "model_index.json").exists():
            read_trainable(home)
    return place, of_lora


def _set_start(
    transformer: ModelMixin,
    started: dict[str, Matrices] | None,
    adapter: LoraConfig | None,
    seed: int,
) -> None:
    """Set `started` as the adapter's values, or merged without one; else draw values."""
    if adapter and started:
        set_values(transformer, started, adapter)
    elif adapter:
        # From its own generator: neither base model nor number of processes changes a LoRA
        draw_lora(transformer, adapter.r, generator("adapter", seed))
    elif started:
        merge(transformer, started)
