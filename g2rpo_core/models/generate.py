"""Samples images of prompts deterministically from a policy, for the monitor of training and for evaluation."""

from collections.abc import Iterable, Iterator
from math import exp
from pathlib import Path

import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from diffusers.pipelines.flux.pipeline_flux import calculate_shift

from g2rpo_core.common.model_store import AGAIN
from g2rpo_core.common.seeding import generator
from g2rpo_core.data.embeddings import Conditioning, EmbeddingStore
from g2rpo_core.data.prompts import Prompt
from g2rpo_core.errors import UserError
from g2rpo_core.files import reading, whole
from g2rpo_core.models.flux import Policy
from g2rpo_core.rollout.rollout import sample
from g2rpo_core.sampling.schedule import sigma_at


def published_shift(pipeline: Path, image_tokens: int) -> float:
    """The shift of the sigmas with which FluxPipeline itself samples images of this many tokens.

    This is its scheduler's own shift or, if that depends on the resolution, exp(mu) of `calculate_shift`: 3.158 for FLUX.1-dev at
    1024². UserError for a scheduler whose sigmas are not `sigma_at` of any shift.
    """
    whole(file := pipeline / "scheduler" / "scheduler_config.json", AGAIN)
    with reading(file, AGAIN):
        config = FlowMatchEulerDiscreteScheduler(**FlowMatchEulerDiscreteScheduler.load_config(pipeline / "scheduler")).config
    others = ("use_karras_sigmas", "use_exponential_sigmas", "use_beta_sigmas", "shift_terminal", "invert_sigmas")
    if strange := [name for name in others if config[name]]:
        raise UserError(f"{pipeline / 'scheduler'}: {strange[0]} is not supported; use a scheduler without it")
    if not config.use_dynamic_shifting:
        return config.shift
    if config.time_shift_type != "exponential":
        raise UserError(f"{pipeline / 'scheduler'}: time_shift_type {config.time_shift_type} is not supported, only exponential")
    lengths = (config.base_image_seq_len, config.max_image_seq_len)
    return exp(calculate_shift(image_tokens, *lengths, config.base_shift, config.max_shift))


@torch.no_grad()
def generate_images(
    policy: Policy,
    prompts: EmbeddingStore,
    count: int,
    steps: int,
    shift: float,
    seed: int,
    batch: int,
    batches: Iterable[int] | None = None,
    trained_share: float = 1.0,
) -> Iterator[tuple[list[Prompt], torch.Tensor]]:
    """Yields images [n, 3, H, W] of the first `count` prompts, batch by batch; batches: which batches, all by default.

    trained_share: share of the steps, from the noisy end, by the policy; the base does the rest (MixGRPO's hybrid inference,
    arXiv 2507.21802). Below 1, the policy must have its base (`Policy.use_base`).

    The noise depends only on the seed and the prompt's id, so that any batch size or number of processes gives the same images.
    """
    training = policy.transformer.training
    policy.transformer.eval()
    starts = range(0, min(count, len(prompts)), batch)
    for start in starts if batches is None else (starts[number] for number in batches):
        indices = range(start, min(start + batch, count, len(prompts)))
        part = [prompts.prompts[index] for index in indices]
        initial = torch.stack([policy.noise(generator("evaluation", seed, prompt.id)) for prompt in part])
        yield part, draw(policy, prompts.conditioning(indices), initial, steps, shift, batch, trained_share)
    policy.transformer.train(training)


@torch.no_grad()
def draw(
    policy: Policy,
    conditioning: Conditioning,
    initial: torch.Tensor,
    steps: int,
    shift: float,
    batch: int,
    trained_share: float = 1.0,
) -> torch.Tensor:
    """Images [n, 3, H, W] from packed initial noise [n, tokens, channels], one for each encoded prompt; see `generate_images`."""
    sigmas = [sigma_at(step, steps, shift) for step in range(steps + 1)]
    handed_over = round(trained_share * steps)
    latents = sample(policy.sampling_velocity(conditioning), initial, sigmas[: handed_over + 1], batch)
    if handed_over < steps:
        latents = sample(policy.base_velocity(conditioning), latents, sigmas[handed_over:], batch)
    return policy.decode(latents, batch)
