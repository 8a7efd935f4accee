"""Samples images of prompts without noise from a policy, for training's monitor and evaluation."""

from collections.abc import Iterable, Iterator, Sequence

import torch

from g2rpo_core.data.embeddings import Conditioning, EmbeddingStore
from g2rpo_core.data.prompts import Prompt
from g2rpo_core.models.policy import Policy
from g2rpo_core.sampling.rollout import sample
from g2rpo_core.sampling.seeding import generator


@torch.no_grad()
def generate_images(
    policy: Policy,
    prompts: EmbeddingStore,
    count: int,
    sigmas: Sequence[float],
    seed: int,
    batch: int,
    batches: Iterable[int] | None = None,
    trained_share: float = 1.0,
) -> Iterator[tuple[list[Prompt], torch.Tensor]]:
    """Yield images [n, 3, H, W] of the first `count` prompts, batch by batch.

    batches: numbers of those to make, all by default; sigmas: T + 1 for T steps, falling from 1 to
    0; trained_share: share of the steps, from the noisy end, by the policy; the base does the rest
    (MixGRPO's hybrid inference, arXiv 2507.21802). Below 1, the policy must have its base
    (`Policy.use_base`).

    The noise depends only on the seed and the prompt's id, so that any batch size or number of
    processes gives the same images.
    """
    # The monitor samples in the midst of training, which goes on as it was
    training = policy.transformer.training
    policy.transformer.eval()
    starts = range(0, min(count, len(prompts)), batch)
    try:
        for start in starts if batches is None else (starts[number] for number in batches):
            indices = range(start, min(start + batch, count, len(prompts)))
            part = [prompts.prompts[index] for index in indices]
            initial = torch.stack(
                [policy.noise(generator("evaluation", seed, prompt.id)) for prompt in part]
            )
            yield (
                part,
                draw(policy, prompts.conditioning(indices), initial, sigmas, batch, trained_share),
            )
    finally:  # also where the caller takes no more
        policy.transformer.train(training)


@torch.no_grad()
def draw(
    policy: Policy,
    conditioning: Conditioning,
    initial: torch.Tensor,
    sigmas: Sequence[float],
    batch: int,
    trained_share: float = 1.0,
) -> torch.Tensor:
    """Sample images [n, 3, H, W] from initial noise [n, ...], one per encoded prompt.

    See `Policy.noise` and `generate_images`.
    """
    steps = len(sigmas) - 1
    # As in training: padding costs attention and changes no image
    conditioning = policy.cut(conditioning)
    # At least one step by the policy, however small its share is above 0
    handed_over = max(bool(trained_share), round(trained_share * steps))
    latents = sample(
        policy.sampling_velocity(conditioning), initial, sigmas[: handed_over + 1], batch
    )
    if handed_over < steps:
        latents = sample(policy.base_velocity(conditioning), latents, sigmas[handed_over:], batch)
    return policy.decode(latents, batch)
