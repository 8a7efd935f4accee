"""What is trained on: sampled transitions with their advantages, and the batches of states that they become.

Axes: R rewards, P prompts, B branches, J granularities, G members of a group; a transition has V states and W next states of a
prompt (see `SampledTransition`); a batch has N states with M sampled next states each.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Literal

import torch

from g2rpo_core.distributed.process_group import ProcessGroup
from g2rpo_core.sampling.rollout import SampledTransition, prompt_of_rows


@dataclass(frozen=True)
class TrainedTransition:
    """A sampled transition that is trained on."""

    sampled: SampledTransition
    """The transition."""
    advantages: torch.Tensor
    """[P, W]: of its next states."""
    weights: torch.Tensor
    """[P, W]: of its next states in the loss; 0 leaves one out."""

    def members(self, members: slice) -> "TrainedTransition":
        """Return the same for a part of the next states."""
        return TrainedTransition(self.sampled.members(members), self.advantages[:, members], self.weights[:, members])


@dataclass(frozen=True)
class TransitionBatch:
    """Transitions to train on: N states, each with M sampled next states."""

    latents: torch.Tensor
    """[N, ...]: the states."""
    mean: torch.Tensor
    """[N, ...]: of the transition that sampled."""
    next_latents: torch.Tensor
    """[N, M, ...]: the sampled next states."""
    old_log_prob: torch.Tensor
    """[N, M]: under the policy that sampled."""
    advantages: torch.Tensor
    """[N, M]."""
    weights: torch.Tensor
    """[N, M]: in the loss."""
    step: torch.Tensor
    """[N] int64: where each transition starts."""
    span: torch.Tensor
    """[N] int64: how many steps of the grid it takes."""
    prompt: torch.Tensor
    """[N] int64: index of its prompt among the P."""

    def split(self, size: int) -> Iterator["TransitionBatch"]:
        """Yield parts of at most `size` states."""
        for parts in zip(*(getattr(self, field.name).split(size) for field in fields(self))):
            yield TransitionBatch(*parts)

    def states(self, chosen: torch.Tensor) -> "TransitionBatch":
        """Return some of the states, by index."""
        return TransitionBatch(*(getattr(self, field.name)[chosen] for field in fields(self)))

    @classmethod
    def concatenated(cls, batches: list["TransitionBatch"]) -> "TransitionBatch":
        """Return one batch with the states of all batches."""
        return cls(*(torch.cat([getattr(batch, field.name) for batch in batches]) for field in fields(cls)))


def split_updates(
    transitions: list[TrainedTransition], updates: Literal["iteration", "step"] | int
) -> list[list[TrainedTransition]]:
    """Return the transitions of each optimizer step of an iteration (see `ObjectiveSettings.updates_per_rollout`)."""
    if updates == "iteration":
        return [transitions]
    if updates == "step":
        return [[transition] for transition in transitions]
    parts = torch.arange(transitions[0].advantages.shape[1]).tensor_split(updates)
    slices = [slice(int(part[0]), int(part[-1]) + 1) for part in parts if len(part)]
    return [[transition.members(members) for transition in transitions] for members in slices]


def transition_batches(transitions: list[TrainedTransition], processes: ProcessGroup | None = None) -> list[TransitionBatch]:
    """Batch the states to train on: those with equally many next states together, those with most first.

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
    """Return N = P * V states with M = W / V next states each."""
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
