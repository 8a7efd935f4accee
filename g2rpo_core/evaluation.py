"""Pictures of a policy for test prompts, and their scores as a tidy table."""

from collections.abc import Iterable, Iterator, Mapping

import pandas as pd
import torch

from .config import SamplingSettings
from .embeddings import EmbeddingStore
from .policy import Policy
from .prompts import Prompt
from .randomness import generator
from .rewards import Reward, score_all
from .rollout import sample
from .schedule import sigma_at
from .world import World


@torch.no_grad()
def pictures(
    policy: Policy,
    prompts: EmbeddingStore,
    count: int,
    steps: int,
    shift: float,
    seed: int,
    batch: int,
    parts: Iterable[int] | None = None,
) -> Iterator[tuple[list[Prompt], torch.Tensor]]:
    """Pictures [n, 3, H, W] of the first `count` prompts, a batch at a time, by deterministic sampling; parts: which batches.

    The noise depends on the seed and the prompt's id alone, so that any batch size or number of processes gives the same.
    """
    sigmas = [sigma_at(step, steps, shift) for step in range(steps + 1)]
    training = policy.transformer.training
    policy.transformer.eval()
    starts = range(0, min(count, len(prompts)), batch)
    for start in starts if parts is None else (starts[part] for part in parts):
        indices = range(start, min(start + batch, count, len(prompts)))
        part = [prompts.prompts[index] for index in indices]
        initial = torch.stack([policy.noise(generator("evaluation", seed, prompt.id)) for prompt in part])
        latents = sample(policy.sampling_velocity(prompts.conditioning(indices)), initial, sigmas, batch)
        yield part, policy.decode(latents, batch)
    policy.transformer.train(training)


def score(rewards: Mapping[str, Reward], part: list[Prompt], images: torch.Tensor) -> pd.DataFrame:
    """One row for each prompt and reward: prompt_id, style, reward, score (NaN where it could not be had)."""
    scores = score_all(rewards, images, [prompt.text for prompt in part])
    rows = [
        {"prompt_id": prompt.id, "style": prompt.style, "reward": name, "score": value}
        for name, values in zip(rewards, scores.tolist())
        for prompt, value in zip(part, values)
    ]
    return pd.DataFrame(rows)


def heldout_means(
    policy: Policy,
    prompts: EmbeddingStore,
    rewards: Mapping[str, Reward],
    count: int,
    sampling: SamplingSettings,
    world: World = World(),  # noqa: B008
) -> dict[str, float]:
    """`heldout_<reward>`: each reward's mean over the first `count` test prompts with noise that training never sees; collective.

    Where batches cannot be shared evenly, the last one is made more than once: sharded weights need all processes in every call.
    """
    batch = sampling.decode_batch
    last = -(-min(count, len(prompts)) // batch) - 1
    mine = [min(turn + world.rank, last) for turn in range(0, last + 1, world.size)]
    parts = pictures(policy, prompts, count, sampling.steps, sampling.shift, 0, batch, mine)
    scored = {
        number: score_all(rewards, images, [prompt.text for prompt in part]).cpu() for number, (part, images) in zip(mine, parts)
    }
    everyone = {number: scores for one in world.gather(scored) for number, scores in one.items()}
    scores = torch.cat([everyone[number] for number in range(last + 1)], 1)
    return {f"heldout_{name}": values.mean().item() for name, values in zip(rewards, scores)}
