"""Find the learning rate from which on a run loses more than it gains, in a few optimizer steps."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path

import pandas as pd
import torch

from g2rpo_core.config.profile import ResolvedRun
from g2rpo_core.data.embeddings import EmbeddingStore
from g2rpo_core.foundation.errors import UserError
from g2rpo_core.models.generate import generate_images
from g2rpo_core.models.policy import Policy, policy_settings
from g2rpo_core.rewards.scoring import score_table
from g2rpo_core.rewards.spec import Reward
from g2rpo_core.sampling.schedule import even_sigmas
from g2rpo_core.training.experience import NonFiniteError
from g2rpo_core.training.trainer import Trainer

LOST = 2.0  # standard errors below the start from which on a score counts as lost


@dataclass(frozen=True)
class Change:
    """A held-out reward after a walk minus before, over prompts with both scores."""

    mean: float
    error: float
    """Standard error of the mean; NaN of fewer than two prompts."""

    @property
    def lost(self) -> bool:
        """Say whether it fell by more than chance, or ended in numbers that are not finite."""
        return not math.isfinite(self.mean) or self.mean < -LOST * self.error


@dataclass(frozen=True)
class Walk:
    """Some optimizer steps of an entry at a constant learning rate, from the same weights."""

    method: str
    """An entry of the profile."""
    rate: float
    updates: int
    drift: float
    """Root mean square change of held-out images of the same noise, in [0, 1]; NaN as below."""
    changes: dict[str, Change]
    """Of every held-out reward; NaN if the run ended in numbers that are not finite."""


@dataclass(frozen=True)
class _Seen:
    scores: pd.DataFrame
    """[prompts, rewards]."""
    images: torch.Tensor


def load_policy(
    pipeline: Path,
    weights: Path | None,
    run: ResolvedRun,
    seed: int,
    device: torch.device,
    start: Path | None = None,
) -> Policy:
    """Load a policy with gradients, as an entry computes.

    weights: a run's; None: those that its training begins with. Only a LoRA's have gradients
    if the run has one, or the base gets one. start: the weights of `training.start`.
    """
    settings = policy_settings(run.sampling.drawn, device, **run.sampling.size)
    if weights is None:
        return Policy.load_to_train(pipeline, run.training.lora, seed, start=start, **settings)
    policy = Policy.load(pipeline, weights, **settings)
    if run.method.objective.needs_base:
        began = (
            Policy.load_to_train(pipeline, run.training.lora, seed, start=start, **settings)
            if start
            else pipeline
        )
        policy.use_base(began)
    if policy.quantize and not policy.has_lora:
        raise UserError(
            f"{weights}: whole weights in {policy.quantize} have no gradients: "
            "choose a run with a LoRA"
        )
    for name, parameter in policy.transformer.named_parameters():
        parameter.requires_grad_(not policy.has_lora or "lora_" in name)
    return policy


def walks(
    policy: Policy,
    run: ResolvedRun,
    rates: Sequence[float],
    updates: int,
    prompts: tuple[EmbeddingStore, EmbeddingStore],
    rewards: Mapping[str, Reward],
    heldout: Mapping[str, Reward],
    count: int,
    seed: int,
) -> Iterator[Walk]:
    """Train an entry for at least `updates` steps at each rate, and compare held-out scores.

    Each walk begins from the policy's weights, which are those again at the end, and has the same
    prompts and noise; its rate is constant, and there is no average of the weights. prompts: to
    train on, and held out, of which the first `count` are judged; rewards: those of
    `run.training.rewards`; heldout: what judges.
    """
    train_on, judged_on = prompts
    parameters = list(policy.trained_parameters().values())
    start = [each.detach().to("cpu", copy=True) for each in parameters]
    before = _look(policy, judged_on, heldout, count, run)
    # As many iterations as make that many steps
    each_makes = run.method.num_updates(run.sampling.steps)
    iterations = -(-updates // each_makes)
    for rate in rates:
        walk = {"learning_rate": rate, "lr_scheduler": "constant", "iterations": iterations}
        training = run.training.model_copy(update=walk | {"ema": None})
        trainer = Trainer(replace(run, training=training), policy, train_on, rewards, seed)
        try:
            for iteration in range(iterations):
                trainer.iterate(iteration)
            after = _look(policy, judged_on, heldout, count, run)
        except NonFiniteError:
            after = None
        yield Walk(run.name, rate, iterations * each_makes, *_compare(before, after))
        with torch.no_grad():
            for parameter, value in zip(parameters, start, strict=True):
                parameter.copy_(value)
        policy.refresh()


def cliff(found: Sequence[Walk], judge: str) -> float | None:
    """Return the smallest rate from which on every walk loses the judge; None if the last does not.

    found: of one entry, by rising rates.
    """
    losing = list(takewhile(lambda walk: walk.changes[judge].lost, reversed(found)))
    return losing[-1].rate if losing else None


def _look(
    policy: Policy,
    prompts: EmbeddingStore,
    rewards: Mapping[str, Reward],
    count: int,
    run: ResolvedRun,
) -> _Seen:
    """Draw and score the first held-out prompts."""
    sampling, tables, images = run.sampling, [], []
    sigmas = even_sigmas(sampling.steps, sampling.shift)
    for part, drawn in generate_images(policy, prompts, count, sigmas, 0, sampling.decode_batch):
        tables.append(score_table(rewards, part, drawn))
        images.append(drawn.float().cpu())
    scores = pd.concat(tables).pivot(index="prompt_id", columns="reward", values="score")
    return _Seen(scores, torch.cat(images))


def _compare(before: _Seen, after: _Seen | None) -> tuple[float, dict[str, Change]]:
    """Return the drift of images and the change of every reward; all NaN without an end.

    UserError if a reward scored nothing, which is no loss.
    """
    if after is None:
        return math.nan, {name: Change(math.nan, math.nan) for name in before.scores}
    gaps = after.scores - before.scores
    if unscored := [name for name, gap in gaps.items() if gap.isna().all()]:
        raise UserError(f"{unscored[0]}: no held-out prompt has a score before and after the steps")
    drift = (after.images - before.images).square().mean().sqrt().item()
    return drift, {
        str(name): Change(float(gap.mean()), float(gap.sem())) for name, gap in gaps.items()
    }
