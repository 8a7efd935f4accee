"""Draw images with a profile's models, which are loaded when first needed, and kept."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path

import torch
from diffusers import DiffusionPipeline
from diffusers.utils.logging import disable_progress_bar
from peft.tuners.tuners_utils import BaseTunerLayer
from transformers.utils.logging import disable_progress_bar as disable_progress_bar_of_encoders

from g2rpo_core.architectures.architecture import Schedule
from g2rpo_core.architectures.table import (
    check_sampling,
    read_architecture,
    read_schedule,
    text_encoders,
)
from g2rpo_core.config import Profile
from g2rpo_core.data.embeddings import (
    DTYPES,
    Conditioning,
    check_lengths,
    encode,
    encode_negative,
    note_short_encoders,
)
from g2rpo_core.data.prompts import Prompt
from g2rpo_core.hub.model_store import ModelStore
from g2rpo_core.models.generate import draw
from g2rpo_core.models.policy import Policy, policy_settings
from g2rpo_core.numerics.processes import device_of
from g2rpo_core.sampling.settings import SamplingSettings


class Painter:
    """Draws prompts with the base and one profile's runs, at its evaluation's size.

    models: the folder of the stage `models`; device: as of `device_of`. UserError if torch finds no
    such device.
    """

    def __init__(self, profile: Profile, models: Path, device: str | None = None):
        self.profile, self.models = profile, models
        self.device = device_of(device)
        self.pipeline = ModelStore(models).folder("pipeline")
        self._policies: dict[tuple, Policy] = {}

    @cached_property
    def encoders(self) -> DiffusionPipeline:
        """Load the pipeline without transformer and VAE."""
        disable_progress_bar()
        disable_progress_bar_of_encoders()
        return text_encoders(self.pipeline, dtype=DTYPES[self.profile.embed.dtype]).to(self.device)

    @cached_property
    def negative(self) -> Mapping[str, torch.Tensor] | None:
        """Return the encoding of the empty prompt, float32 [1, ...], if the base model needs it."""
        encoded = encode_negative(self.encoders, self.profile.embed.max_sequence_length)
        return encoded and {name: tensor.float() for name, tensor in encoded.items()}

    def policy(self, folder: Path | None, sampling: SamplingSettings | None = None) -> Policy:
        """Return the policy with a run's weights, which draws as the run does.

        folder: the run's, None for the base; sampling: None for the profile's.
        """
        drawn = (sampling or self.profile.sampling).drawn
        key = (folder, *(value for name, value in drawn.items() if name != "guidance"))
        if key not in self._policies:
            size = {
                "height": self.profile.evaluation.height,
                "width": self.profile.evaluation.width,
            }
            self._policies[key] = Policy.load(
                self.pipeline, folder, **policy_settings(drawn, self.device, **size)
            )
        policy = self._policies[key]
        check_sampling(self.pipeline, drawn["guidance"])
        policy.guidance = drawn["guidance"]
        return policy

    def forget(self) -> None:
        """Let go of the weights of all runs, so that the next run has the memory."""
        self._policies.clear()

    def encode(self, prompts: Sequence[Prompt]) -> list[Conditioning]:
        """Encode each prompt, float32 [1, ...]; UserError for one that is too long."""
        embed = self.profile.embed
        check_lengths(
            prompts,
            read_architecture(self.pipeline).tokenizer(self.encoders),
            embed.max_sequence_length,
        )
        note_short_encoders(prompts, self.encoders)
        rows = encode(self.encoders, prompts, embed.max_sequence_length, embed.batch)
        return [
            Conditioning(
                {name: tensor.float()[None] for name, tensor in row.tensors.items()}, self.negative
            )
            for _, row in rows
        ]

    def draw(
        self,
        folder: Path | None,
        prompt: Conditioning,
        seeds: Sequence[int],
        steps: int,
        sampling: SamplingSettings | None = None,
        trained_share: float = 1.0,
        lora_scale: float = 1.0,
    ) -> torch.Tensor:
        """Draw images [N, 3, H, W] in [0, 1] of one encoded prompt, one per seed.

        A seed gives every prompt and run the same noise: that of diffusers with the generator
        `torch.Generator().manual_seed(seed)`. sampling: as in `policy`; trained_share:
        share of the steps in (0, 1], from the noisy end, by the run; the base does the rest.
        lora_scale: strength of a LoRA run.
        """
        policy = self.policy(folder, sampling)
        share = trained_share if folder else 1.0
        if share < 1 and not policy.has_lora:
            policy.use_base(self.policy(None, sampling))
        drawn_in = policy.architecture.noise_dtype or policy.dtype
        noise = torch.stack(
            [policy.noise(torch.Generator().manual_seed(seed), dtype=drawn_in) for seed in seeds]
        )
        sigmas = self.find_schedule(policy).sigmas(steps)
        with scale_lora(policy, lora_scale):
            images = draw(
                policy,
                prompt.repeated(len(seeds)),
                noise,
                sigmas,
                self.profile.evaluation.batch,
                share,
            )
        return images.cpu().clamp(0, 1)

    def find_schedule(self, policy: Policy) -> Schedule:
        """Return the sigmas with which the pipeline itself samples images of this size."""
        return read_schedule(policy.architecture, self.pipeline, policy.image_tokens)


@contextmanager
def scale_lora(policy: Policy, scale: float) -> Iterator[None]:
    """Multiply the strength of the policy's LoRA, if it has one, by `scale` within the block."""
    layers = [
        module for module in policy.transformer.modules() if isinstance(module, BaseTunerLayer)
    ]

    def set_scale(value: float) -> None:
        for layer in layers:
            for adapter in layer.active_adapters:
                layer.set_scale(adapter, value)

    set_scale(scale)
    try:
        yield
    finally:
        set_scale(1.0)
