"""Pictures of a policy for test prompts, and their scores as a tidy table."""

from collections.abc import Iterable, Iterator, Mapping

import pandas as pd
import torch

from . import looks
from .config import EvaluationSettings, SamplingSettings
from .embeddings import EmbeddingStore
from .errors import UserError
from .policy import Policy
from .prompts import Prompt
from .randomness import generator, seed_of
from .rewards import Reward, judge_all
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
    trained_share: float = 1.0,
) -> Iterator[tuple[list[Prompt], torch.Tensor]]:
    """Pictures [n, 3, H, W] of the first `count` prompts, a batch at a time, by deterministic sampling; parts: which batches.

    trained_share: of the steps, from the noisy end; the base does the others (MixGRPO's hybrid inference, arXiv 2507.21802). Below
    1 the policy must have its base (`Policy.use_base`).

    The noise depends on the seed and the prompt's id alone, so that any batch size or number of processes gives the same.
    """
    sigmas = [sigma_at(step, steps, shift) for step in range(steps + 1)]
    handed_over = round(trained_share * steps)
    training = policy.transformer.training
    policy.transformer.eval()
    starts = range(0, min(count, len(prompts)), batch)
    for start in starts if parts is None else (starts[part] for part in parts):
        indices = range(start, min(start + batch, count, len(prompts)))
        part = [prompts.prompts[index] for index in indices]
        initial = torch.stack([policy.noise(generator("evaluation", seed, prompt.id)) for prompt in part])
        conditioning = prompts.conditioning(indices)
        latents = sample(policy.sampling_velocity(conditioning), initial, sigmas[: handed_over + 1], batch)
        if handed_over < steps:
            latents = sample(policy.base_velocity(conditioning), latents, sigmas[handed_over:], batch)
        yield part, policy.decode(latents, batch)
    policy.transformer.train(training)


def score(rewards: Mapping[str, Reward], part: list[Prompt], images: torch.Tensor) -> pd.DataFrame:
    """One row for each prompt and reward: prompt_id, style, reward, score, reason; score NaN and a reason where it could not be had."""
    scores, reasons = judge_all(rewards, images, [prompt.text for prompt in part])
    rows = [
        {"prompt_id": prompt.id, "style": prompt.style, "reward": name, "score": value, "reason": reason}
        for name, values, why in zip(rewards, scores.tolist(), reasons)
        for prompt, value, reason in zip(part, values, why)
    ]
    return pd.DataFrame(rows).astype({"reason": "string"})


def evaluate_batch(
    policy: Policy,
    store: EmbeddingStore,
    rewards: Mapping[str, Reward],
    settings: EvaluationSettings,
    steps: int,
    shift: float,
    number: int,
    trained_share: float,
) -> tuple[list[Prompt], torch.Tensor, pd.DataFrame]:
    """The prompts of a batch, their pictures, and rows as `score` gives them: rewards, looks, and diversity where it is asked for."""

    def made(count: int, seed: int) -> tuple[list[Prompt], torch.Tensor]:
        (batch,) = pictures(policy, store, count, steps, shift, seed, settings.batch, [number], trained_share)
        return batch

    prompts, images = made(len(store), settings.seed)
    rows = [score({**rewards, **looks.MEASURES}, prompts, images)]
    asked = settings.diversity
    if asked and number * settings.batch < asked.prompts:
        again = [made(asked.prompts, seed_of("diversity", settings.seed, turn)) for turn in range(asked.noises)]
        found = looks.diversity(torch.stack([one for _, one in again]))
        rows.append(score({"diversity": lambda *_: found}, again[0][0], again[0][1]))
    return prompts, images, pd.concat(rows)


def check_missing(name: str, missing: int, total: int, largest: float, reason: str = "") -> None:
    """UserError if more than the share `largest` of `total` scores of a reward is missing; `reason`: one of those that are."""
    if missing > largest * total:
        raise UserError(
            f"reward {name}: {missing} of {total} scores are missing, over rewards.{name}.max_missing = {largest:g}; for example: {reason}"
        )


def heldout_means(
    policy: Policy,
    prompts: EmbeddingStore,
    rewards: Mapping[str, Reward],
    count: int,
    sampling: SamplingSettings,
    world: World = World(),  # noqa: B008
    max_missing: Mapping[str, float] | None = None,
) -> dict[str, float]:
    """`heldout_<reward>`: each reward's mean over the first `count` test prompts with noise that training never sees; collective.

    max_missing: of each reward, the share of scores that may be missing (none if it is left out); the mean is over the others.

    Where batches cannot be shared evenly, the last one is made more than once: sharded weights need all processes in every call.
    """
    batch = sampling.decode_batch
    last = -(-min(count, len(prompts)) // batch) - 1
    mine = [min(turn + world.rank, last) for turn in range(0, last + 1, world.size)]
    parts = pictures(policy, prompts, count, sampling.steps, sampling.shift, 0, batch, mine)
    scored = {number: score(rewards, part, images) for number, (part, images) in zip(mine, parts)}
    everyone = {number: table for one in world.gather(scored) for number, table in one.items()}
    table = pd.concat([everyone[number] for number in range(last + 1)])
    for name in rewards:
        reasons = table.reason[table.reward == name].dropna()
        check_missing(name, len(reasons), min(count, len(prompts)), (max_missing or {}).get(name, 0.0), *reasons[:1])
    return {f"heldout_{name}": float(table.score[table.reward == name].mean()) for name in rewards}
