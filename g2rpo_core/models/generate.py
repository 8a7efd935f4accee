"""Images of prompts by a policy, by deterministic sampling: what training monitors and evaluation scores."""

from collections.abc import Iterable, Iterator

import torch

from g2rpo_core.common.seeding import generator
from g2rpo_core.data.embeddings import EmbeddingStore
from g2rpo_core.data.prompts import Prompt
from g2rpo_core.models.flux import Policy
from g2rpo_core.rollout.rollout import sample
from g2rpo_core.sampling.schedule import sigma_at


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
    """Images [n, 3, H, W] of the first `count` prompts, a batch at a time; batches: which of them, all by default.

    trained_share: of the steps, from the noisy end; the base does the others (MixGRPO's hybrid inference, arXiv 2507.21802). Below
    1 the policy must have its base (`Policy.use_base`).

    The noise depends on the seed and the prompt's id alone, so that any batch size or number of processes gives the same.
    """
    sigmas = [sigma_at(step, steps, shift) for step in range(steps + 1)]
    handed_over = round(trained_share * steps)
    training = policy.transformer.training
    policy.transformer.eval()
    starts = range(0, min(count, len(prompts)), batch)
    for start in starts if batches is None else (starts[number] for number in batches):
        indices = range(start, min(start + batch, count, len(prompts)))
        part = [prompts.prompts[index] for index in indices]
        initial = torch.stack([policy.noise(generator("evaluation", seed, prompt.id)) for prompt in part])
        conditioning = prompts.conditioning(indices)
        latents = sample(policy.sampling_velocity(conditioning), initial, sigmas[: handed_over + 1], batch)
        if handed_over < steps:
            latents = sample(policy.base_velocity(conditioning), latents, sigmas[handed_over:], batch)
        yield part, policy.decode(latents, batch)
    policy.transformer.train(training)
