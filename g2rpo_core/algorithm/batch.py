"""Training data: transitions with advantages, batches made from them, and per-sample losses.

Axes: R rewards, P prompts, B branches, J granularities, G members of a group; a transition has V
states and W next states of a prompt (see `SampledTransition`); a batch has N states with M sampled
next states each.
"""

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Generic, Literal, NamedTuple, Protocol, Self, TypeVar

import torch

from g2rpo_core.distributed.process_group import ProcessGroup
from g2rpo_core.sampling.rollout import Rollout, SampledTransition, Velocity, prompt_of_rows
from g2rpo_core.sampling.seeding import generator, seed_of


class Draws(NamedTuple):
    """Random numbers that select training data, by name: the same for any number of processes."""

    seed: int
    """Of the run."""
    iteration: int
    """From 0."""
    prompts: range
    """Indices in the iteration of this process's P prompts."""

    def rng(self, *index: int) -> random.Random:
        """Make the generator of the iteration, or of a prompt's index in it."""
        return random.Random(seed_of("trained", self.seed, self.iteration, *index))

    def generator(self, index: int) -> torch.Generator:
        """Make the generator of a prompt's tensors."""
        return generator("noised", self.seed, self.iteration, index)


@dataclass(frozen=True)
class Losses:
    """The losses of a batch of N rows with M samples each."""

    total: torch.Tensor
    """[N, M], weighted, to be summed and differentiated."""
    sums: dict[str, torch.Tensor]
    """Figure -> its sum over the samples that count, without gradient."""
    ratio_error: torch.Tensor | None = None
    """The largest |ratio - 1|; None for an objective without ratios."""


@dataclass(frozen=True, kw_only=True)
class Batch:
    """N rows to train on, each with M samples; tensors are [N, ...], None if the batch has none."""

    advantages: torch.Tensor
    """[N, M]."""
    weights: torch.Tensor
    """[N, M]: in the loss."""
    prompt: torch.Tensor
    """[N] int64: index of its prompt among the P."""

    def __len__(self) -> int:
        return len(self.prompt)

    def _parts(self) -> dict[str, torch.Tensor]:
        return {name: value for name, value in vars(self).items() if value is not None}

    def split(self, size: int) -> Iterator[Self]:
        """Yield parts of at most `size` rows."""
        parts = {name: value.split(size) for name, value in self._parts().items()}
        for row in zip(*parts.values()):
            yield replace(self, **dict(zip(parts, row)))

    def rows(self, chosen: torch.Tensor) -> Self:
        """Return some of the rows, by index."""
        # replace, not a constructor: subclasses have more tensors
        return replace(self, **{name: value[chosen] for name, value in self._parts().items()})

    @classmethod
    def concatenated(cls, batches: Sequence[Self]) -> Self:
        """Return one batch with the rows of all batches."""
        return replace(
            batches[0],
            **{
                name: torch.cat([vars(batch)[name] for batch in batches])
                for name in batches[0]._parts()
            },
        )


B = TypeVar("B", bound=Batch)


@dataclass(frozen=True)
class Update(Generic[B]):
    """What one optimizer step trains on."""

    batches: Sequence[B]
    """Not yet split to fit into memory."""
    num_samples: int
    """Over which the loss is a mean."""
    description: str
    """For error messages."""


class Objective(Protocol[B]):
    """What a trainer requires of an objective; B: its own batches, which `losses` gets back."""

    def advantages(
        self, sampled: Rollout, rewards: torch.Tensor, gains: Sequence[torch.Tensor] | None, /
    ) -> list[torch.Tensor]:
        """Return the advantages of all that is trained on; see `CreditAssignment`. Collective."""
        ...

    def updates(
        self,
        sampled: Rollout,
        advantages: Sequence[torch.Tensor],
        draws: Draws,
        velocity: Velocity,
        /,
    ) -> Iterable[Update[B]]:
        """Return the optimizer steps of an iteration. Collective.

        velocity: of the policy that sampled, without gradient.
        """
        ...

    def losses(self, velocity: Velocity, reference: Velocity | None, batch: B, /) -> Losses:
        """Compute the losses of a batch; reference: of the model before training, if needed."""
        ...


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
        """Return this transition for a part of its next states."""
        return TrainedTransition(
            self.sampled.members(members), self.advantages[:, members], self.weights[:, members]
        )


@dataclass(frozen=True, kw_only=True)
class TransitionBatch(Batch):
    """Transitions to train on: N states, each with M sampled next states."""

    latents: torch.Tensor
    """[N, ...]: the states."""
    mean: torch.Tensor
    """[N, ...]: of the transition that sampled."""
    next_latents: torch.Tensor
    """[N, M, ...]: the sampled next states."""
    old_log_prob: torch.Tensor
    """[N, M]: under the policy that sampled."""
    step: torch.Tensor
    """[N] int64: where each transition starts."""
    span: torch.Tensor
    """[N] int64: how many steps of the grid it takes."""


def split_updates(
    transitions: list[TrainedTransition], updates: Literal["iteration", "step"] | int
) -> list[list[TrainedTransition]]:
    """Group transitions by optimizer step, see `ObjectiveSettings.updates_per_rollout`."""
    if updates == "iteration":
        return [transitions]
    if updates == "step":
        return [[transition] for transition in transitions]
    parts = parts_of_group(transitions[0].advantages.shape[1], updates)
    return [[transition.members(members) for transition in transitions] for members in parts]


def parts_of_group(members: int, updates: int) -> list[slice]:
    """Split the members of a group into `updates` runs of neighbours of nearly equal size."""
    # Neighbours, not a random part: members of one initial noise stay together
    parts = torch.arange(members).tensor_split(updates)
    return [slice(int(part[0]), int(part[-1]) + 1) for part in parts if len(part)]


def transition_batches(
    transitions: list[TrainedTransition], processes: ProcessGroup | None = None
) -> list[TransitionBatch]:
    """Batch the states to train on, one batch per number of next states, largest first.

    processes: drop states whose next states all have weight 0, except as many as are needed so that
    all processes have equally many states; collective then.
    """
    rows = [_rows(transition) for transition in transitions]
    # One batch for each number of members: padding would cost forwards for nothing
    batches = []
    for members in sorted({row.old_log_prob.shape[1] for row in rows}, reverse=True):
        batch = TransitionBatch.concatenated(
            [row for row in rows if row.old_log_prob.shape[1] == members]
        )
        if processes:
            # Sharded weights need every process in every call, so all must have equally many states
            needed = batch.weights.any(1)
            count = max(processes.gather(int(needed.sum())))
            batch = batch.rows(needed.logical_not().sort(stable=True).indices[:count].sort().values)
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
