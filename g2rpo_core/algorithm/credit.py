"""Gives every sampled transition its advantages: which reward belongs to it, and with which others that is compared.

Axes: R rewards, P prompts, B branches, J granularities, G members of a group; W next states of a transition.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Literal

import torch
from pydantic import Discriminator, Field, Tag

from g2rpo_core.algorithm.advantage import branch_advantages, mean_of_shared_states
from g2rpo_core.distributed.process_group import ProcessGroup
from g2rpo_core.foundation.settings import Settings
from g2rpo_core.sampling.rollout import SampledTransition


class _Comparison(Settings):
    """With what a reward is compared; the part `credit` of a method is one of the two below."""

    reward: str
    compared: Literal["prompt", "noise"] = Field(
        "prompt", description="an advantage compares all members of a prompt, or those of one initial noise, as TempFlow-GRPO"
    )
    deviation: Literal["group", "batch"] = Field(
        "group",
        description="rewards are divided by the standard deviation of their group, or of the iteration's rewards, as Flow-GRPO",
    )
    reward_aggr: Literal["rewards", "advantages"] = Field(
        "advantages",
        description="of several rewards, the weighted sum is standardized, as Flow-GRPO; or each reward by itself, and the weighted sum is of "
        "their advantages, as MixGRPO and the core of GDPO",
    )

    @property
    def needs_predictions(self) -> bool:
        """Say whether the rollout must keep its clean predictions."""
        return self.reward == "gain"


class ImageCredit(_Comparison):
    """An SDE step has the reward of the image that it led to."""

    reward: Literal["image"] = Field("image", description="image: an SDE step's reward is that of its image")
    node_advantages: Literal["standardized", "mean"] = Field(
        "standardized",
        description="of a state that several members share: their mean reward standardized again, as BranchGRPO, or the mean of their "
        "advantages, as TreeGRPO",
    )


class GainCredit(_Comparison):
    """An SDE step has what the clean prediction gains by it, compared with the gains of all steps of its group (Stepwise-Flow-GRPO)."""

    reward: Literal["gain"] = Field(description="gain: an SDE step's reward is what the clean prediction gains by it")


def _kind(value: object) -> object:
    """Return which credit a value is: settings that do not say it are those of images."""
    return value.get("reward", "image") if isinstance(value, Mapping) else getattr(value, "reward", "image")


CreditSettings = Annotated[Annotated[ImageCredit, Tag("image")] | Annotated[GainCredit, Tag("gain")], Discriminator(_kind)]


def batch_deviation(rewards: torch.Tensor, processes: ProcessGroup) -> torch.Tensor:
    """Return the standard deviation (ddof 0) of an iteration's rewards of all processes: [R, P, B, J, W] -> [R, J, 1, 1].

    It is float64. Collective.
    """
    every = torch.cat(processes.gather(rewards.transpose(1, 3).flatten(2).cpu()), -1)  # [R, J, P * B * W of all]
    return every.double().std(-1, correction=0)[..., None, None].to(rewards.device)


DEVIATIONS: dict[str, Callable[[torch.Tensor, ProcessGroup], torch.Tensor | None]] = {
    "group": lambda rewards, processes: None,  # each group's own
    "batch": batch_deviation,
}


def weighted_sum(values: torch.Tensor, weights: Sequence[float]) -> torch.Tensor:
    """Return the weighted sum of R rewards as one: [R, ...] -> [1, ...]."""
    return torch.einsum("r,r...->...", values.new_tensor(weights), values)[None]


def _aggregated(
    values: torch.Tensor, size: torch.Tensor, credit: ImageCredit | GainCredit, weights: Sequence[float]
) -> tuple[torch.Tensor, torch.Tensor, Sequence[float]]:
    """Return values and size [R, ...] with their weights; as their weighted sum [1, ...] with weight 1 if `credit` says so."""
    if credit.reward_aggr == "advantages":
        return values, size, weights
    # Rounding does not cancel: of a difference, sizes add up
    return weighted_sum(values, weights), weighted_sum(size, [abs(weight) for weight in weights]), [1.0]


def transition_advantages(
    transitions: Sequence[SampledTransition],
    rewards: torch.Tensor,
    gains: Sequence[torch.Tensor] | None,
    credit: ImageCredit | GainCredit,
    groups: int,
    weights: Sequence[float],
    clip: float,
    processes: ProcessGroup = ProcessGroup(),  # noqa: B008
) -> list[torch.Tensor]:
    """Return the advantages [P, W] of every transition's next states; collective where the deviation is the batch's.

    rewards: [R, P, B, J, G] of the images; gains: of every transition [R, P, W] for `GainCredit`; groups: into which a prompt's members are
    divided (`Method.groups`); weights: of the R rewards; clip: the largest advantage.
    """
    # What is compared, and the size of what it was computed from, in proportion to which it is rounded
    values, size = rewards, rewards.abs()
    if gains is not None:
        # All gains of a group together: the steps' own spreads stay, so that a step that changes little has small advantages
        of_group = [gain.unflatten(-1, (groups, -1)) for gain in gains]  # [R, P, groups, W / groups]
        values = torch.cat(of_group, -1).flatten(2)[:, :, None, None]  # [R, P, 1, 1, W of all]
        # of the scores whose differences gains are, as far as they are known: those of the images, and the gains
        size = torch.cat([size.flatten(2), values.flatten(2).abs()], -1).amax(-1)[:, :, None, None, None].expand_as(values)
    values, size, weights = _aggregated(values, size, credit, weights)

    def advantages(values: torch.Tensor, size: torch.Tensor) -> torch.Tensor:
        return branch_advantages(values, weights, clip, groups, DEVIATIONS[credit.deviation](values, processes), size)

    of_members = advantages(values, size)  # [P, B, G], or [P, 1, W of all] of gains
    if gains is not None:
        parts = of_members[:, 0].unflatten(-1, (groups, -1)).split([each.shape[-1] for each in of_group], -1)
        return [part.flatten(1) for part in parts]
    found = []
    for transition in transitions:
        branch, width = transition.sde_step.branch, transition.log_prob.shape[1]
        if width == values.shape[-1]:
            found.append(of_members[:, branch])
        elif isinstance(credit, ImageCredit) and credit.node_advantages == "mean":
            found.append(mean_of_shared_states(of_members[:, branch], width))
        else:
            shared = (mean_of_shared_states(each[:, :, [branch]], width) for each in (values, size))
            found.append(advantages(*shared)[:, 0])
    return found


def image_advantages(
    rewards: torch.Tensor,
    credit: ImageCredit | GainCredit,
    groups: int,
    weights: Sequence[float],
    clip: float,
    processes: ProcessGroup = ProcessGroup(),  # noqa: B008
) -> torch.Tensor:
    """Return the advantages [P, B * J, G] of images, each compared with those of its branch and granularity; arguments as above."""
    values = rewards.flatten(2, 3).unsqueeze(3)  # [R, P, B * J, 1, G]
    values, size, weights = _aggregated(values, values.abs(), credit, weights)
    return branch_advantages(values, weights, clip, groups, DEVIATIONS[credit.deviation](values, processes), size)
