"""Credit assignment: maps rewards to transitions and normalizes them within their comparison group.

Axes: R rewards, P prompts, B branches, J granularities, G members of a group; W next states of a
transition.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from pydantic import Discriminator, Field, Tag

from g2rpo_core.algorithm.advantage import branch_advantages, mean_of_shared_states
from g2rpo_core.distributed.process_group import ALONE, ProcessGroup
from g2rpo_core.foundation.settings import Settings
from g2rpo_core.sampling.rollout import SampledTransition


class _Comparison(Settings):
    """What a reward is compared with; the section `credit` of a method is one of the two below."""

    reward: str
    compared: Literal["prompt", "noise"] = Field(
        "prompt",
        description=(
            "`prompt`: an advantage compares all members of a prompt; "
            "`noise`: only those of one initial noise (TempFlow-GRPO)."
        ),
    )
    deviation: Literal["group", "batch"] = Field(
        "group",
        description=(
            "Standard deviation that rewards are divided by: that of their group, "
            "or of all rewards of the iteration (Flow-GRPO)."
        ),
    )
    reward_aggr: Literal["rewards", "advantages"] = Field(
        "advantages",
        description=(
            "`rewards`: standardize the weighted sum of all rewards (Flow-GRPO); `advantages`: "
            "standardize each reward, then sum the weighted advantages (MixGRPO, the core of GDPO)."
        ),
    )

    @property
    def needs_predictions(self) -> bool:
        """Say whether the rollout must keep its clean predictions."""
        return self.reward == "gain"


class ImageCredit(_Comparison):
    """Credit by image: an SDE step has the reward of the image that it led to."""

    reward: Literal["image"] = Field(
        "image", description="An SDE step's reward is that of its image."
    )
    node_advantages: Literal["standardized", "mean"] = Field(
        "standardized",
        description=(
            "Advantage of a state that several members share. `standardized`: their mean reward, "
            "standardized again (BranchGRPO); `mean`: the mean of their advantages (TreeGRPO)."
        ),
    )


class GainCredit(_Comparison):
    """Credit by gain: an SDE step has what the clean prediction gains by it (Stepwise-Flow-GRPO).

    The gains of all steps of a group are compared together.
    """

    reward: Literal["gain"] = Field(
        description="An SDE step's reward is what the clean prediction gains by it."
    )


def _kind(value: object) -> object:
    """Return the kind of some credit settings; without `reward` they are those of images."""
    return (
        value.get("reward", "image")
        if isinstance(value, Mapping)
        else getattr(value, "reward", "image")
    )


CreditSettings = Annotated[
    Annotated[ImageCredit, Tag("image")] | Annotated[GainCredit, Tag("gain")], Discriminator(_kind)
]


def batch_deviation(rewards: torch.Tensor, processes: ProcessGroup) -> torch.Tensor:
    """Return the standard deviation (ddof 0) of an iteration's rewards: float64 [R, J, 1, 1].

    rewards: [R, P, B, J, W] of this process; those of all processes count. Collective.
    """
    # Values, not moments: their sum over processes would depend on how prompts are shared.
    # Shape: [R, J, P * B * W of all]
    every = torch.cat(processes.gather(rewards.transpose(1, 3).flatten(2).cpu()), -1)
    return every.double().std(-1, correction=0)[..., None, None].to(rewards.device)


def weighted_sum(values: torch.Tensor, weights: Sequence[float]) -> torch.Tensor:
    """Return the weighted sum of R rewards as one: [R, ...] -> [1, ...]."""
    return torch.einsum("r,r...->...", values.new_tensor(weights), values)[None]


@dataclass(frozen=True)
class CreditAssignment:
    """How a run's rewards become advantages; the same in every iteration."""

    credit: ImageCredit | GainCredit
    """Of the method."""
    groups: int
    """Into which a prompt's members are divided (`Method.groups`)."""
    weights: Sequence[float]
    """Of the R rewards."""
    clip: float
    """The largest advantage."""
    processes: ProcessGroup = ALONE

    def of_transitions(
        self,
        transitions: Sequence[SampledTransition],
        rewards: torch.Tensor,
        gains: Sequence[torch.Tensor] | None,
    ) -> list[torch.Tensor]:
        """Return the advantages [P, W] of every transition's next states.

        rewards: [R, P, B, J, G] of the images; gains: of every transition [R, P, W], for
        `GainCredit`. Collective if the deviation is the batch's.
        """
        if gains is not None:
            return self._of_gains(rewards, gains)
        values, size, weights = self._aggregated(rewards, rewards.abs())
        of_members = self._standardized(values, size, weights)  # [P, B, G]
        # A state shared by several images is one transition: their rewards must first become one
        advantages = []
        for transition in transitions:
            branch, states = transition.sde_step.branch, transition.log_prob.shape[1]
            if states == values.shape[-1]:
                advantages.append(of_members[:, branch])
            elif isinstance(self.credit, ImageCredit) and self.credit.node_advantages == "mean":
                advantages.append(mean_of_shared_states(of_members[:, branch], states))
            else:
                means, sizes = (
                    mean_of_shared_states(each[:, :, [branch]], states) for each in (values, size)
                )
                advantages.append(self._standardized(means, sizes, weights)[:, 0])
        return advantages

    def of_images(self, rewards: torch.Tensor) -> torch.Tensor:
        """Return the advantages [P, B * J, G] of images, compared within branch and granularity.

        Collective if the deviation is the batch's.
        """
        values = rewards.flatten(2, 3).unsqueeze(3)  # [R, P, B * J, 1, G]
        return self._standardized(*self._aggregated(values, values.abs()))

    def _of_gains(self, rewards: torch.Tensor, gains: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Standardize all gains of a group together: a step that changes little stays small."""
        of_group = [gain.unflatten(-1, (self.groups, -1)) for gain in gains]  # [R, P, groups, -1]
        values = torch.cat(of_group, -1).flatten(2)[:, :, None, None]  # [R, P, 1, 1, W of all]
        # A gain is rounded in proportion to the scores it subtracts; of those only the images' are
        # known, so take the largest of these and the gains
        largest = torch.cat([rewards.flatten(2), values.flatten(2)], -1).abs().amax(-1)  # [R, P]
        size = largest[:, :, None, None, None].expand_as(values)
        of_members = self._standardized(*self._aggregated(values, size))[:, 0]
        parts = of_members.unflatten(-1, (self.groups, -1)).split(
            [each.shape[-1] for each in of_group], -1
        )
        return [part.flatten(1) for part in parts]

    def _aggregated(
        self, values: torch.Tensor, size: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, Sequence[float]]:
        """Return values and size [R, ...] with weights, or their sum [1, ...] with weight 1.

        size: magnitude of what the values were computed from, to which rounding is proportional.
        """
        if self.credit.reward_aggr == "advantages":
            return values, size, self.weights
        # One standardization of the sum: a reward with a larger spread counts more, whatever its
        # weight. Rounding does not cancel, so the sizes of a difference add up
        return (
            weighted_sum(values, self.weights),
            weighted_sum(size, [abs(weight) for weight in self.weights]),
            [1.0],
        )

    def _standardized(
        self, values: torch.Tensor, size: torch.Tensor, weights: Sequence[float]
    ) -> torch.Tensor:
        """Return the advantages [P, B, W] of values [R, P, B, J, W]."""
        deviation = (
            batch_deviation(values, self.processes) if self.credit.deviation == "batch" else None
        )
        return branch_advantages(values, weights, self.clip, self.groups, deviation, size)
