"""What is trained on: sampled transitions with their advantages, and the batches of states that they become.

Axes: R rewards, P prompts, B branches, J granularities, G members of a group; a transition has V states and W next states of a
prompt (see `SampledTransition`); a batch has N states with M sampled next states each.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Literal

import torch

from g2rpo_core.algorithm.advantage import group_advantages, of_shared_states
from g2rpo_core.algorithm.methods import Method
from g2rpo_core.distributed.process_group import ProcessGroup
from g2rpo_core.rollout.rollout import SampledTransition, prompt_of_rows


@dataclass(frozen=True)
class TrainedTransition:
    """A sampled transition with the advantages of its next states and their weights in the loss, each [P, W]; 0 leaves one out."""

    sampled: SampledTransition
    advantages: torch.Tensor
    weights: torch.Tensor

    def members(self, members: slice) -> "TrainedTransition":
        """The same for a part of the next states."""
        return TrainedTransition(self.sampled.members(members), self.advantages[:, members], self.weights[:, members])


@dataclass(frozen=True)
class TransitionBatch:
    """Transitions to train on: N states, each with M sampled next states.

    latents: [N, ...]; mean: [N, ...] of the transition that sampled; next_latents: [N, M, ...]; old_log_prob, advantages, weights:
    [N, M]; step, span, prompt: [N] int64.
    """

    latents: torch.Tensor
    mean: torch.Tensor
    next_latents: torch.Tensor
    old_log_prob: torch.Tensor
    advantages: torch.Tensor
    weights: torch.Tensor
    step: torch.Tensor
    span: torch.Tensor
    prompt: torch.Tensor

    def split(self, size: int) -> Iterator["TransitionBatch"]:
        """Parts of at most `size` states."""
        for parts in zip(*(getattr(self, field.name).split(size) for field in fields(self))):
            yield TransitionBatch(*parts)

    def states(self, chosen: torch.Tensor) -> "TransitionBatch":
        """Some of the states, by index."""
        return TransitionBatch(*(getattr(self, field.name)[chosen] for field in fields(self)))

    @classmethod
    def concatenated(cls, batches: list["TransitionBatch"]) -> "TransitionBatch":
        """One batch with the states of all batches."""
        return cls(*(torch.cat([getattr(batch, field.name) for batch in batches]) for field in fields(cls)))


def branch_advantages(
    rewards: torch.Tensor, weights: list[float], clip: float, groups: int = 1, deviation: torch.Tensor | None = None
) -> torch.Tensor:
    """Rewards [R, P, B, J, W] -> advantages [P, B, W]: a prompt's branch is divided into this many groups, whose members stand side by side.

    deviation: [R, J, 1, 1] as of `standardized`. A group of one has an advantage of 0.
    """
    _, prompts, branches, _, width = rewards.shape
    if width <= groups:
        return rewards.new_zeros(prompts, branches, width)
    grouped = rewards.unflatten(-1, (groups, width // groups))  # [R, P, B, J, groups, -1]
    compared = grouped.permute(0, 3, 1, 2, 4, 5).flatten(2, 4)  # [R, J, P * B * groups, -1]
    return group_advantages(compared, weights, clip, deviation).view(prompts, branches, width)


def batch_deviation(rewards: torch.Tensor, processes: ProcessGroup) -> torch.Tensor:
    """[R, P, B, J, W] -> [R, J, 1, 1]: the standard deviation (ddof 0) of an iteration's rewards of all processes. Collective."""
    every = torch.cat(processes.gather(rewards.transpose(1, 3).flatten(2).cpu()), -1)  # [R, J, P * B * W of all]
    return every.std(-1, correction=0)[..., None, None].to(rewards.device)


def transition_advantages(
    transitions: Sequence[SampledTransition],
    rewards: torch.Tensor,
    gains: Sequence[torch.Tensor] | None,
    method: Method,
    weights: list[float],
    clip: float,
    processes: ProcessGroup = ProcessGroup(),  # noqa: B008
) -> list[torch.Tensor]:
    """The advantages [P, W] of every transition's next states; collective where `method.deviation` is the batch's.

    rewards: [R, P, B, J, G] of the images; gains: of every transition [R, P, W] where `method.credit` is `gain`.
    """

    def advantages(values: torch.Tensor) -> torch.Tensor:
        groups = method.initial_noises if method.compared == "noise" and isinstance(method.initial_noises, int) else 1
        deviation = batch_deviation(values, processes) if method.deviation == "batch" else None
        return branch_advantages(values, weights, clip, groups, deviation)

    if gains is not None:
        return [advantages(gain[:, :, None, None])[:, 0] for gain in gains]
    of_members = advantages(rewards)  # [P, B, G]
    found = []
    for transition in transitions:
        branch, width = transition.sde_step.branch, transition.log_prob.shape[1]
        if width == rewards.shape[-1]:
            found.append(of_members[:, branch])
        elif method.node_advantages == "mean":
            found.append(of_shared_states(of_members[:, branch], width))
        else:
            found.append(advantages(of_shared_states(rewards[:, :, [branch]], width))[:, 0])
    return found


def noise_weights(stds: Sequence[float]) -> list[float]:
    """The weight of every SDE step in the loss by the standard deviation of its noise, 1 on average (TempFlow-GRPO)."""
    return [std * len(stds) / sum(stds) for std in stds]


def drawn_by_members(method: Method, num_transitions: int, members: int, rngs: Sequence[random.Random]) -> torch.Tensor:
    """Which transitions each member of each prompt trains on: 0 or 1 [K, P, G], float32 on the CPU; rngs: one per prompt."""
    drawn = torch.zeros(num_transitions, len(rngs), members)
    for prompt, rng in enumerate(rngs):
        for member in range(members):
            drawn[method.trained(num_transitions, rng), prompt, member] = 1.0
    return drawn


def split_updates(
    transitions: list[TrainedTransition], updates: Literal["iteration", "step"] | int
) -> list[list[TrainedTransition]]:
    """The transitions of each optimizer step of an iteration (see `Method.updates_per_rollout`)."""
    if updates == "iteration":
        return [transitions]
    if updates == "step":
        return [[transition] for transition in transitions]
    parts = torch.arange(transitions[0].advantages.shape[1]).tensor_split(updates)
    slices = [slice(int(part[0]), int(part[-1]) + 1) for part in parts if len(part)]
    return [[transition.members(members) for transition in transitions] for members in slices]


def transition_batches(transitions: list[TrainedTransition], processes: ProcessGroup | None = None) -> list[TransitionBatch]:
    """Batches of states to train on: states with equally many next states together, those with most first.

    processes: leave out the states whose next states all have a weight of 0, but for as many as are needed so that all processes have
    equally many states; collective then.
    """
    rows = [_rows(transition) for transition in transitions]
    batches = []
    for members in sorted({row.old_log_prob.shape[1] for row in rows}, reverse=True):
        batch = TransitionBatch.concatenated([row for row in rows if row.old_log_prob.shape[1] == members])
        if processes:
            needed = batch.weights.any(1)
            count = max(processes.gather(int(needed.sum())))
            batch = batch.states(needed.logical_not().sort(stable=True).indices[:count].sort().values)
        batches.append(batch)
    return batches


def _rows(transition: TrainedTransition) -> TransitionBatch:
    """N = P * V states with M = W / V next states each."""
    sampled = transition.sampled
    rows = (sampled.latents.shape[:2].numel(), sampled.members_of_state)
    prompt = prompt_of_rows(sampled.latents)
    return TransitionBatch(
        latents=sampled.latents.flatten(0, 1),
        mean=sampled.mean.flatten(0, 1),
        next_latents=sampled.next_latents.reshape(*rows, *sampled.next_latents.shape[2:]),
        old_log_prob=sampled.log_prob.reshape(rows),
        advantages=transition.advantages.reshape(rows),
        weights=transition.weights.reshape(rows),
        step=torch.full_like(prompt, sampled.sde_step.step),
        span=torch.full_like(prompt, sampled.sde_step.span),
        prompt=prompt,
    )
