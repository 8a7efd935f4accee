"""The batch that is trained on: sampled transitions with their advantages, as rows of states.

Axes: R rewards, P prompts, B branches, J granularities, G members of a group; N states with M sampled next states each.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Literal

import torch

from g2rpo_core.algorithm.advantage import group_advantages
from g2rpo_core.rollout.rollout import SampledTransition, prompt_of_rows


@dataclass(frozen=True)
class TransitionBatch:
    """Transitions to train on: N states, each with M sampled next states.

    latents: [N, ...]; mean: [N, ...] of the transition that sampled; next_latents: [N, M, ...]; old_log_prob, advantages: [N, M];
    step, prompt: [N] int64.
    """

    latents: torch.Tensor
    mean: torch.Tensor
    next_latents: torch.Tensor
    old_log_prob: torch.Tensor
    advantages: torch.Tensor
    step: torch.Tensor
    prompt: torch.Tensor

    def split(self, size: int) -> Iterator["TransitionBatch"]:
        """Parts of at most `size` states."""
        for parts in zip(*(getattr(self, field.name).split(size) for field in fields(self))):
            yield TransitionBatch(*parts)

    @classmethod
    def concatenated(cls, batches: list["TransitionBatch"]) -> "TransitionBatch":
        """One batch with the states of all batches."""
        return cls(*(torch.cat([getattr(batch, field.name) for batch in batches]) for field in fields(cls)))


def branch_advantages(rewards: torch.Tensor, weights: list[float], clip: float) -> torch.Tensor:
    """Rewards [R, P, B, J, G] -> advantages [P, B, G]: each branch of a prompt is its own group."""
    _, prompts, branches, _, group = rewards.shape
    groups = rewards.permute(0, 3, 1, 2, 4).flatten(2, 3)  # [R, J, P * B, G]
    return group_advantages(groups, weights, clip).view(prompts, branches, group)


def split_updates(
    transitions: list[SampledTransition], advantages: torch.Tensor, updates: Literal["iteration", "step"] | int
) -> list[tuple[list[SampledTransition], torch.Tensor]]:
    """The transitions of each optimizer step of an iteration with their advantages [P, B, G].

    See `Method.updates_per_rollout`.
    """
    if updates == "iteration":
        return [(transitions, advantages)]
    if updates == "step":
        return [([transition], advantages) for transition in transitions]
    parts = torch.arange(advantages.shape[-1]).tensor_split(updates)
    slices = [slice(int(part[0]), int(part[-1]) + 1) for part in parts if len(part)]
    return [([transition.members(members) for transition in transitions], advantages[..., members]) for members in slices]


def transition_batches(transitions: list[SampledTransition], advantages: torch.Tensor) -> list[TransitionBatch]:
    """Batches of transitions with their advantages [P, B, G].

    Those with one state per group are kept apart from those with one per member.
    """
    shared = [_rows(transition, advantages) for transition in transitions if transition.shared]
    apart = [_rows(transition, advantages) for transition in transitions if not transition.shared]
    return [TransitionBatch.concatenated(rows) for rows in (shared, apart) if rows]


def _rows(transition: SampledTransition, advantages: torch.Tensor) -> TransitionBatch:
    """N = P states with M = G next states if the group departs from one state, else N = P * G with M = 1."""
    prompts, group = transition.log_prob.shape
    rows = (prompts, group) if transition.shared else (prompts * group, 1)
    prompt = prompt_of_rows(transition.latents)
    return TransitionBatch(
        latents=transition.latents.flatten(0, 1),
        mean=transition.mean.flatten(0, 1),
        next_latents=transition.next_latents.reshape(*rows, *transition.next_latents.shape[2:]),
        old_log_prob=transition.log_prob.reshape(rows),
        advantages=advantages[:, transition.sde_step.branch].reshape(rows),
        step=torch.full_like(prompt, transition.sde_step.step),
        prompt=prompt,
    )
