"""Objectives on sampled transitions: the clipped policy gradient and its variants.

A trainer hands over batches and gets a loss for each sample: it knows nothing of ratios, trust
regions or weights. Each choice is a table of functions, as `sampling.transitions.SDES`; a new one
is an entry with its equation.
"""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, NamedTuple

import torch
from pydantic import Field, model_validator

from g2rpo_core.algorithm.batch import (
    Draws,
    Losses,
    TrainedTransition,
    TransitionBatch,
    Update,
    split_updates,
    transition_batches,
)
from g2rpo_core.algorithm.credit import CreditAssignment
from g2rpo_core.algorithm.loss import clipped_loss, masked_loss, normalized_ratio, ratio
from g2rpo_core.foundation.settings import Count, Settings
from g2rpo_core.sampling.rollout import Rollout, SampledTransition, Velocity
from g2rpo_core.sampling.transitions import Stochastic, Transition
from g2rpo_core.sampling.tree import Tree


class ObjectiveSettings(Settings):
    """The section `objective` of a method that trains on transitions."""

    trains: Literal["transitions"] = Field(
        "transitions", description="Train on the steps with noise, by their density."
    )
    timestep_fraction: float = Field(
        1.0,
        gt=0,
        le=1,
        description="Share of the SDE steps that is trained on, redrawn each iteration.",
    )
    timesteps_of: Literal["group", "member"] = Field(
        "group",
        description="Draw that share once for all members, or for each by itself (DanceGRPO).",
    )
    step_weights: Literal["equal", "noise"] = Field(
        "equal",
        description=(
            "Weights of the SDE steps in the policy loss. "
            "`noise`: by the standard deviation of their noise (TempFlow-GRPO)."
        ),
    )
    updates_per_rollout: Literal["iteration", "step"] | Count = Field(
        "iteration",
        description=(
            "One optimizer step per iteration, one per SDE step, or this many, "
            "each on its part of every group."
        ),
    )
    ratio: Literal["plain", "normalized"] = Field(
        "plain", description="`normalized`: as in GRPO-Guard, see `loss.normalized_ratio`."
    )
    kl_mask: float | None = Field(
        None,
        gt=0,
        le=1e6,
        description=(
            "Mask samples whose transition is farther from the sampling policy than this KL "
            "divergence, a mean over elements (Flow-DPPO); null: clip the ratio "
            "(training.clip_range)."
        ),
    )
    kl_coef: float = Field(
        0.0,
        ge=0,
        le=1e6,
        description="Beta, the weight of the KL divergence to the model before training.",
    )

    @model_validator(mode="after")
    def _every_update_has_members(self):
        if self.updates_per_rollout == "step" and self.timesteps_of == "member":
            raise ValueError(
                "updates_per_rollout: step may have no member to train if timesteps_of is member: "
                "must be iteration or a number"
            )
        return self

    def num_trained(self, num_sde_steps: int) -> int:
        """Return floor(timestep_fraction * num_sde_steps), at least 1 (as in DanceGRPO)."""
        return max(1, int(self.timestep_fraction * num_sde_steps))

    @property
    def needs_base(self) -> bool:
        """Say whether the velocity of the model before training is needed."""
        return self.kl_coef > 0

    @property
    def extra_forwards(self) -> int:
        """Count the forward evaluations without gradient of each state."""
        return int(self.needs_base)

    @property
    def old(self) -> None:
        """Return None: transitions keep the policy that sampled them, so no slow copy is needed."""
        return None

    def trained_rows(self, tree: Tree, group_size: int) -> list[tuple[int, int]]:
        """Return (states, next states) of a prompt's trained transitions, for the estimate.

        If only a share is drawn, the first transitions count.
        """
        widths, trained = tree.widths(group_size), self.num_trained(len(tree.sde_steps))
        return [(widths[before], widths[after]) for before, after in tree.transitions()[:trained]]

    def draw_steps(self, num_sde_steps: int, rng: random.Random) -> list[int]:
        """Draw the SDE steps, of all branches, that an iteration trains on: sorted indices."""
        return sorted(rng.sample(range(num_sde_steps), self.num_trained(num_sde_steps)))

    def num_updates(self, num_sde_steps: int) -> int:
        """Return the number of optimizer steps of an iteration with `num_sde_steps` SDE steps.

        Before the first one the ratio is 1: nothing can be clipped.
        """
        if self.updates_per_rollout == "iteration":
            return 1
        if self.updates_per_rollout == "step":
            return self.num_trained(num_sde_steps)
        return self.updates_per_rollout


@dataclass(frozen=True)
class Recomputed:
    """A batch's transitions under the current policy, beside those that sampled it.

    Tensors are [N, M], or [N, 1] where members agree.
    """

    current: Transition
    batch: TransitionBatch
    sigmas: torch.Tensor

    @cached_property
    def log_prob(self) -> torch.Tensor:
        """Return the log-probability [N, M] of the sampled next states under the current policy."""
        members = self.batch.next_latents.shape[1]
        return (
            self.current.repeat(members)
            .log_prob(self.batch.next_latents.flatten(0, 1))
            .view(-1, members)
        )

    @cached_property
    def divergence(self) -> torch.Tensor:
        """Return the KL divergence [N, 1] to the sampling transition, a mean over elements."""
        return self.current.kl(replace(self.current, mean=self.batch.mean))[:, None]

    @property
    def std(self) -> torch.Tensor:
        """Return the standard deviation of each transition: [N, 1]."""
        return self.current.std.flatten(1)

    @property
    def length(self) -> torch.Tensor:
        """Return how far each transition goes in sigma, above 0: [N, 1]."""
        start = self.batch.step
        return (self.sigmas[start] - self.sigmas[start + self.batch.span])[:, None]


class Ratio(NamedTuple):
    """A kind of probability ratio, and what it makes of the loss."""

    compute: Callable[[Recomputed], torch.Tensor]
    """The ratio [N, M] of recomputed transitions."""
    length: Callable[[Recomputed], torch.Tensor | float] = lambda now: 1.0
    """What the loss [N, M] is divided by, which evens out the steps' gradients."""


RATIOS: dict[str, Ratio] = {
    "plain": Ratio(lambda now: ratio(now.log_prob, now.batch.old_log_prob)),
    # GRPO-Guard
    "normalized": Ratio(
        lambda now: normalized_ratio(now.log_prob, now.batch.old_log_prob, now.divergence, now.std),
        lambda now: now.length,
    ),
}
"""By `ObjectiveSettings.ratio`."""


def noise_weights(stds: Mapping[int, float]) -> dict[int, float]:
    """Return each step's weight: the std of its noise, scaled to a mean of 1 (TempFlow-GRPO)."""
    return {step: std * len(stds) / sum(stds.values()) for step, std in stds.items()}


STEP_WEIGHTS: dict[
    str, Callable[[Callable[[int, int], float], Mapping[int, int]], Mapping[int, float]]
] = {
    "equal": lambda std, spans: dict.fromkeys(spans, 1.0),
    "noise": lambda std, spans: noise_weights(
        {step: std(step, span) for step, span in spans.items()}
    ),
}
"""weights(std(step, span), step -> span) -> step -> weight, by `ObjectiveSettings.step_weights`."""


def draw_by_member(
    settings: ObjectiveSettings, num_steps: int, members: int, rngs: Sequence[random.Random]
) -> torch.Tensor:
    """Draw which transitions each member trains on: 0 or 1, float32 [K, P, G] on the CPU.

    rngs: one per prompt.
    """
    # On the CPU, a generator per prompt: the draw must not depend on device or number of processes
    drawn = torch.zeros(num_steps, len(rngs), members)
    for prompt, rng in enumerate(rngs):
        for member in range(members):
            drawn[settings.draw_steps(num_steps, rng), prompt, member] = 1.0
    return drawn


class PolicyGradient:
    """The objective of a run (Eq. 6-9, 12): draws what is trained on, and computes the loss.

    credit: of the run; transition: the tree's stochastic step on the sigmas [T+1]; clip_range: eps
    of the clipped ratio; spans: of every step that may be an SDE step, whether or not an iteration
    has noise there (`tree.spans_at`).
    """

    def __init__(
        self,
        settings: ObjectiveSettings,
        credit: CreditAssignment,
        transition: Stochastic,
        sigmas: torch.Tensor,
        clip_range: float,
        spans: Mapping[int, int],
    ):
        self.settings, self.credit, self.transition = settings, credit, transition
        self.sigmas, self.clip_range = sigmas, clip_range
        self.step_weights = STEP_WEIGHTS[settings.step_weights](self.std, spans)

    @property
    def by_member(self) -> bool:
        """Say whether each member of a group trains on SDE steps of its own."""
        return self.settings.timesteps_of == "member"

    def advantages(
        self, sampled: Rollout, rewards: torch.Tensor, gains: Sequence[torch.Tensor] | None
    ) -> list[torch.Tensor]:
        """Return the advantages [P, W] of every transition; arguments as of `CreditAssignment`."""
        return self.credit.of_transitions(sampled.transitions, rewards, gains)

    def updates(
        self, sampled: Rollout, advantages: Sequence[torch.Tensor], draws: Draws, velocity: Velocity
    ) -> Iterator[Update[TransitionBatch]]:
        """Yield the optimizer steps of an iteration; transitions need no call of `velocity`."""
        trained = self.draw(sampled.transitions, advantages, draws)
        for transitions in split_updates(trained, self.settings.updates_per_rollout):
            yield self.update(transitions)  # one at a time: batches are copies of the states

    def update(self, transitions: list[TrainedTransition]) -> Update[TransitionBatch]:
        """Return an optimizer step on these transitions; collective if `by_member`."""
        batches = transition_batches(transitions, self.credit.processes if self.by_member else None)
        weights = [batch.weights for batch in batches]
        count = sum(
            int(each.count_nonzero()) if self.by_member else each.numel() for each in weights
        )
        steps = [transition.sampled.sde_step.step for transition in transitions]
        return Update(batches, count, f"the SDE steps {steps}")

    def draw(
        self, sampled: Sequence[SampledTransition], advantages: Sequence[torch.Tensor], draws: Draws
    ) -> list[TrainedTransition]:
        """Draw the trained transitions, with advantages [P, W] and weights of their next states."""
        count = len(sampled)
        if self.by_member:
            drawn = draw_by_member(
                self.settings,
                count,
                advantages[0].shape[1],
                [draws.rng(index) for index in draws.prompts],
            )
            chosen, weights = list(range(count)), list(drawn.to(advantages[0].device))
        else:
            chosen = self.settings.draw_steps(count, draws.rng())
            weights = [torch.ones_like(advantages[index]) for index in chosen]
        # 0 stays 0: the noise of a step does not bring back a member that the draw left out
        weights = [
            weight * self.step_weights[sampled[index].sde_step.step]
            for index, weight in zip(chosen, weights)
        ]
        return [
            TrainedTransition(sampled[index], advantages[index], weight)
            for index, weight in zip(chosen, weights)
        ]

    def std(self, step: int, span: int) -> float:
        """Return the standard deviation of an SDE step's noise, the same for all latents."""
        # Computed by the transition itself, so that the formula of the deviation stands once
        one = torch.zeros(1, 1, device=self.sigmas.device)
        return float(self.transition(one, one, step=step, span=span).std)

    def losses(
        self, velocity: Velocity, reference: Velocity | None, batch: TransitionBatch
    ) -> Losses:
        """Compute the losses of a batch: a forward of `velocity`, and of `reference` if given.

        reference: of the model before training.
        """
        settings = self.settings
        now = Recomputed(self._step(velocity, batch), batch, self.sigmas)
        # The ratio, and the loss within the trust region
        kind = RATIOS[settings.ratio]
        r = kind.compute(now)
        if settings.kl_mask is None:
            loss = clipped_loss(r, batch.advantages, self.clip_range)
            outside = (r.detach() - 1).abs() > self.clip_range
        else:
            loss, outside = masked_loss(
                r, batch.advantages, now.divergence.detach().expand_as(r), settings.kl_mask
            )
        # Steps differ in length by an order of magnitude; so do their gradients without this
        loss = loss / kind.length(now)
        # The divergence from the model before training, without the weights of steps: they belong
        # to the noise of a step, and beta to a divergence that every step has alike
        kl = torch.zeros_like(loss)
        if reference:
            with torch.no_grad():
                before = self._step(reference, batch)
            kl = now.current.kl(before)[:, None].expand_as(loss)
        # Figures of what is trained on: a sample counts or does not, whatever its weight
        used = batch.weights > 0
        sums = {
            "loss": (batch.weights * loss.detach()).sum(),
            "kl": (kl.detach() * used).sum(),
            "clip_ratio": (outside & used).sum(),
        }
        return Losses(
            batch.weights * loss + settings.kl_coef * used * kl,
            sums,
            ((r.detach() - 1) * used).abs().max(),
        )

    def _step(self, velocity: Velocity, batch: TransitionBatch) -> Transition:
        """Return the transitions from all N states under a velocity field: one forward."""
        v = velocity(batch.latents, self.sigmas[batch.step], batch.prompt)
        return self.transition(batch.latents, v, step=batch.step, span=batch.span)
