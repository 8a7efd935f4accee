"""Samples the rollouts of one iteration for this process's prompts, and scores their images."""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

import torch

from g2rpo_core.algorithm.methods import Method
from g2rpo_core.data.embeddings import Conditioning
from g2rpo_core.distributed.process_group import ALONE, ProcessGroup
from g2rpo_core.foundation.errors import UserError
from g2rpo_core.models.policy import Policy
from g2rpo_core.rewards.scoring import score_all
from g2rpo_core.rewards.spec import Reward
from g2rpo_core.sampling.rollout import Rollout, rollout
from g2rpo_core.sampling.schedule import shifted_sigmas, sigma_at
from g2rpo_core.sampling.seeding import generator
from g2rpo_core.sampling.settings import SamplingSettings


class NonFiniteError(UserError):
    """A number that is not finite, or an old-policy ratio that is not 1; says where."""


class RolloutSampler:
    """A callable that samples the rollouts of an iteration for P prompts.

    They depend only on seed, iteration and each prompt's index in the iteration. num_generations:
    G, members of a group.
    """

    def __init__(
        self,
        policy: Policy,
        method: Method,
        sampling: SamplingSettings,
        num_generations: int,
        seed: int,
    ):
        self.policy, self.method, self.sampling = policy, method, sampling
        self.num_generations, self.seed = num_generations, seed
        self.sigmas = shifted_sigmas(sampling.steps, sampling.shift).to(policy.device)
        self.transition = method.tree.transition(self.sigmas)
        self.sigma_of = partial(sigma_at, steps=sampling.steps, shift=sampling.shift)

    def __call__(
        self,
        conditioning: Conditioning,
        iteration: int,
        first: int = 0,
        before_call: Callable[[], None] = lambda: None,
    ) -> Rollout:
        """Sample a rollout.

        first: index in the iteration of the first prompt; before_call: called before each call of
        the transformer.
        """
        # The tree, and its noise: of each prompt from its own generator
        settings, group = self.method.tree, self.num_generations
        tree = settings.build(self.sampling.steps, iteration, self.seed)
        # A generator per prompt: the noise depends on neither processes nor neighbours
        generators = [
            generator("rollout", self.seed, iteration, index)
            for index in range(first, first + len(conditioning))
        ]
        # [P, count, ...]
        noise = lambda count: torch.stack([self.policy.noise(each, count) for each in generators])
        initial = noise(tree.width(0, group))
        widths = tree.widths(group)
        ends = zip(tree.transitions(), tree.sde_steps)
        noises = [settings.scaled(noise(widths[after]), step.step) for (_, after), step in ends]
        # The velocity under these prompts
        max_batch = self.policy.batch_size(self.sampling.batch_tokens, conditioning)
        field = self.policy.sampling_velocity(conditioning)

        def velocity(*arguments: torch.Tensor) -> torch.Tensor:
            # A rollout takes minutes: SIGTERM must be seen within it
            before_call()
            return field(*arguments)

        predictions = self.method.credit.needs_predictions
        return rollout(
            velocity,
            tree,
            self.sigma_of,
            self.transition,
            initial,
            noises,
            max_batch,
            settings.solver,
            predictions,
        )


@torch.no_grad()
def score_rollout(
    policy: Policy,
    rewards: Mapping[str, Reward],
    sampled: Rollout,
    texts: list[str],
    decode_batch: int,
    iteration: int,
    processes: ProcessGroup = ALONE,
    before_call: Callable[[], None] = lambda: None,
    watch: Callable[[torch.Tensor, torch.Tensor], None] | None = None,
) -> torch.Tensor:
    """Score every image of a rollout: float32 [R, P, B, J, G].

    texts: the P prompts; decode_batch: images in one call of the VAE; before_call: called before a
    prompt's images are decoded, and before they are scored; watch: called with the images [G, 3, H,
    W] and scores [R, G] of the first prompt's first group. Collective; NonFiniteError names prompt
    and reward. One prompt at a time: the paper's 16 prompts on one GPU would take 59 GiB at once.
    """
    # Decode and score, one prompt's images at a time
    shape = sampled.clean.shape[:4]  # P, B, J, G
    images_per_prompt = math.prod(shape[1:])
    scored = []
    for clean, text in zip(sampled.clean, texts):
        before_call()
        images = policy.decode(clean.flatten(0, 2), decode_batch)
        before_call()
        scored.append(score_all(rewards, images, [text] * images_per_prompt))
        if watch and len(scored) == 1:
            watch(images[: shape[3]], scored[0].values[:, : shape[3]])
    # Stop all processes if a number is not finite on one
    prompts = [text for text in texts for _ in range(images_per_prompt)]
    scores = torch.cat([part.values for part in scored], 1)  # [R, P * B * J * G]
    reasons = [
        [reason for part in of_reward for reason in part]
        for of_reward in zip(*(part.reasons for part in scored))
    ]
    problem = _first_not_finite(rewards, sampled.clean, scores, reasons, prompts)
    if problem := processes.first(problem and f"iteration {iteration + 1}: {problem}"):
        raise NonFiniteError(problem)
    return scores.view(-1, *shape)


def score_gains(sampled: Rollout, score: Callable[[Rollout], torch.Tensor]) -> list[torch.Tensor]:
    """Return the gains [R, P, W] of every transition: rewards of clean predictions, after - before.

    As in arXiv 2603.28718. score: `score_rollout` with all else given. Every prediction is scored
    once, also where one transition follows another. Collective.
    """
    around = sampled.around or []
    # By identity: consecutive transitions share a prediction, which is scored once
    predictions = {id(each): each for pair in around for each in pair}
    scored = {
        key: score(replace(sampled, clean=each[:, None, None]))[:, :, 0, 0]
        for key, each in predictions.items()
    }
    pairs = [(scored[id(before)], scored[id(after)]) for before, after in around]
    return [
        after - before.repeat_interleave(after.shape[-1] // before.shape[-1], -1)
        for before, after in pairs
    ]


def _first_not_finite(
    rewards: Mapping[str, Reward],
    clean: torch.Tensor,
    scores: torch.Tensor,
    reasons: list[list[str | None]],
    prompts: list[str],
) -> str | None:
    """Describe the first latents or score that is not finite, with its prompt; None if all are."""
    # A sum is finite only if all are, and is one number to copy instead of a mask
    sums = clean.flatten(0, 3).flatten(1).sum(1).cpu()
    if not sums.isfinite().all():
        return (
            "latents are not finite for the prompt "
            f"{prompts[int((~sums.isfinite()).nonzero()[0])]!r}"
        )
    for name, values, why in zip(rewards, scores, reasons):
        if not values.isfinite().all():
            index = int((~values.isfinite()).nonzero()[0])
            reason = f": {why[index]}" if why[index] else ""
            return (
                f"reward {name} is {values[index].item()} for the prompt {prompts[index]!r}{reason}"
            )
    return None
