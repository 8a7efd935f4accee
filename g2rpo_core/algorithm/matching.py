"""Objectives on noised clean latents: the forward-process family, as rows of one kernel.

An image x0 that was sampled in any way is noised again, x_t = (1 - t) x0 + t eps, and the velocity
v there is pulled towards the one that leads back to the image, v* = eps - x0, or pushed away from
it, by the image's advantage A. Nothing needs an SDE, its density, or the states on the way. With
v_old the velocity of the policy that sampled, and a the anchor (v_old, or the base's velocity),

    l = w [ c |v - a|^2 + 2 A <v - a, v_old - v*> ]        c = trust, or trust + A

is every loss of the family up to constants; only DiffusionNFT's own two branches differ from it,
once v and v_old do.

| method | c | A | anchor | w |
|---|---|---|---|---|
| DiffusionNFT, arXiv 2509.16117 | beta | A / 5 in [-1, 1] | old | t / mean abs(v± - v*), each |
| AWM, arXiv 2509.25050 | A | A / 5 in [-1, 1] | old | derivative of its Huber loss |
| AdvantageFlow, arXiv 2605.26013 | gamma + A | A in [-1, 1] | old | t / mean abs(v - v*) |
| RVM, arXiv 2608.23664 | beta + A | A / 10 | old | 1 |
| RAM, arXiv 2605.10759 | 1 | m A | base | 1 |

DiffusionNFT weighs each of its two branches v+ and v- by itself. At the first update after a
rollout, and without a slow policy, v is v_old: all rows but RAM's then have the gradient
2 w A (v - v*) of advantage-weighted matching, whatever c is (`MatchingSettings.trust_acts`).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Literal

import torch
from pydantic import Field, model_validator

from g2rpo_core.algorithm.batch import Batch, Draws, Losses, Update, parts_of_group
from g2rpo_core.algorithm.credit import CreditAssignment
from g2rpo_core.foundation.settings import Count, Settings
from g2rpo_core.sampling.rollout import Rollout, Velocity
from g2rpo_core.sampling.tree import Tree

Share = Annotated[float, Field(ge=0, le=1)]
FLOOR = 1e-5  # lower bound of the mean error that a loss is divided by, as published
HUBER = 0.25  # power p of AWM's loss (t / p) ((l + e)^p - e^p), e = 1e-10


class OldPolicy(Settings):
    """A slow copy of the weights: after iteration i, from 0, it is d * copy + (1 - d) * weights."""

    flat: int = Field(
        0, ge=0, le=10**6, description="Iterations with d = 0, where the copy equals the weights."
    )
    ramp: float = Field(
        0.001, gt=0, le=1, description="Increase of d in each iteration after those."
    )
    hold: float = Field(0.5, gt=0, lt=1, description="The largest d.")
    samples: bool = Field(
        True,
        description=(
            "The copy samples the rollouts (DiffusionNFT); "
            "false: it only holds the weights back (AWM's EMA)."
        ),
    )

    def decay_at(self, step: int) -> float:
        """Return d after iteration `step`, from 0."""
        return min(max(0, step - self.flat) * self.ramp, self.hold)


class MatchingSettings(Settings):
    """The section `objective` of a method that trains on noised clean latents."""

    trains: Literal["noised"] = Field(description="Train on clean latents that are noised again.")
    times: Count = Field(1, description="K, how often each image is noised.")
    draw: Literal["grid", "strata", "uniform", "linear"] = Field(
        "grid",
        description=(
            "How times are drawn. `grid`: from the sampler's sigmas, without repetition; `strata`: "
            "one from each of K equal parts; `uniform`: in (0, 1); `linear`: with density 2t."
        ),
    )
    share: tuple[Share, Share] = Field(
        (0.0, 1.0), description="Part of the way from noise to image that times are drawn from."
    )
    shared: bool = Field(
        False,
        description=(
            "All images of a prompt have the same times and noise, "
            "so that what they have in common cancels."
        ),
    )
    loss: Literal["quadratic", "branches"] = Field(
        "quadratic",
        description=(
            "`quadratic`: the kernel in matching.py; "
            "`branches`: DiffusionNFT's positive and negative branch."
        ),
    )
    trust: float = Field(
        0.0,
        ge=0,
        le=1e6,
        description="Weight of the distance to the anchor: beta or gamma of the papers.",
    )
    signed: bool = Field(
        False,
        description=(
            "Add the advantage to `trust`: images with A > 0 are matched, the others repelled."
        ),
    )
    anchor: Literal["old", "base"] = Field(
        "old", description="`old`: the policy that sampled; `base`: the model before training."
    )
    weight: Literal["equal", "error", "huber"] = Field(
        "equal", description="Weight of a noised image, see `matching.WEIGHTS`."
    )
    factor: float = Field(
        1.0, gt=0, le=1e6, description="Factor of the loss, as published, before gradient clipping."
    )
    advantage_scale: float = Field(1.0, gt=0, le=1e6, description="Factor of the advantage.")
    advantage_limit: float | None = Field(
        None, gt=0, le=1e6, description="The largest scaled advantage; null: no limit."
    )
    old: OldPolicy | None = Field(
        None, description="A slow copy of the weights; null: the weights that sampled."
    )
    old_coef: float = Field(
        0.0,
        ge=0,
        le=1e6,
        description="Weight of the velocity's distance to the slow copy (AWM's EMA).",
    )
    kl_coef: float = Field(
        0.0,
        ge=0,
        le=1e6,
        description="Weight of the velocity's distance to the model before training.",
    )
    kl_weighted: bool = Field(
        False, description="Weigh that distance like the noised image (AdvantageFlow)."
    )
    updates_per_rollout: Count = Field(
        1, description="Optimizer steps of an iteration, each on its part of every group."
    )

    @model_validator(mode="after")
    def _fits_together(self):
        if self.share[0] >= self.share[1]:
            raise ValueError("share: must be two rising numbers")
        if self.old_coef and not self.keeps_old:
            raise ValueError("old_coef: without a slow copy (old) there is no distance to it")
        if self.signed and self.anchor == "base":
            raise ValueError(
                "signed: images are matched around the policy that sampled: anchor must be old"
            )
        if self.loss == "branches" and not (
            self.trust
            and self.advantage_limit
            and self.advantage_limit <= 1
            and self.anchor == "old"
        ):
            raise ValueError(
                "loss: branches needs trust above 0, an advantage_limit of at most 1, "
                "and anchor old"
            )
        return self

    @property
    def needs_base(self) -> bool:
        """Say whether the velocity of the model before training is needed."""
        return self.kl_coef > 0 or self.anchor == "base"

    @property
    def keeps_old(self) -> bool:
        """Say whether old velocities are computed before the first update.

        Otherwise they are the current ones without gradient.
        """
        return self.old is not None or self.updates_per_rollout > 1

    @property
    def trust_acts(self) -> bool:
        """Say whether `trust` has an effect.

        At the only update of an iteration v is v_old, and the distance to it has no gradient.
        """
        return self.keeps_old or self.anchor == "base"

    @property
    def extra_forwards(self) -> int:
        """Count the forward evaluations without gradient of each noised image."""
        return self.needs_base + self.keeps_old

    def num_updates(self, num_sde_steps: int) -> int:
        """Return the optimizer steps of an iteration."""
        return self.updates_per_rollout

    def trained_rows(self, tree: Tree, group_size: int) -> list[tuple[int, int]]:
        """Return the noised images of a prompt as one pair (rows, samples), for the estimate."""
        rows = self.times * len(tree.leaves) * len(tree.leaves[0]) * group_size
        return [(rows, rows)]


@dataclass(frozen=True, kw_only=True)
class NoisedBatch(Batch):
    """Images to train on, noised: N rows of one sample each (M = 1)."""

    clean: torch.Tensor
    """[N, ...]: clean latents x0."""
    noise: torch.Tensor
    """[N, ...]: eps."""
    sigma: torch.Tensor
    """[N]: t, above 0."""
    member: torch.Tensor
    """[N] int64: index in its group."""
    old: torch.Tensor | None = None
    """[N, ...]: the old policy's velocity; None: the current one's."""

    @property
    def latents(self) -> torch.Tensor:
        """Return x_t."""
        t = _like(self.sigma, self.clean)
        return (1 - t) * self.clean + t * self.noise

    @property
    def target(self) -> torch.Tensor:
        """Return v* = eps - x0."""
        return self.noise - self.clean


def quadratic(
    v: torch.Tensor,
    anchor: torch.Tensor,
    old: torch.Tensor,
    target: torch.Tensor,
    a: torch.Tensor,
    c: torch.Tensor,
) -> torch.Tensor:
    """Return c |v - anchor|^2 + 2 A <v - anchor, v_old - v*>, means over elements: [N].

    a, c: advantage and curvature [N]. Around v_old with c = A it is A |v - v*|^2 up to a constant.
    """
    away = v - anchor
    return c * mean(away.square()) + 2 * a * mean(away * (old - target))


def branches(
    v: torch.Tensor,
    old: torch.Tensor,
    target: torch.Tensor,
    sigma: torch.Tensor,
    a: torch.Tensor,
    beta: float,
) -> torch.Tensor:
    """Return DiffusionNFT's loss over beta (arXiv 2509.16117, Eq. 5, normalized as its code): [N].

    r = (1 + A) / 2 weighs |x0+ - x0|^2 of the branch v+ = v_old + beta (v - v_old), and 1 - r that
    of v- = v_old - beta (v - v_old), each over its own mean absolute error, without gradient.
    """
    losses = []
    for side in (beta, -beta):
        wrong = _like(sigma, v) * (old + side * (v - old) - target)
        losses.append(mean(wrong.square()) / mean(wrong.detach().abs()).clamp(min=FLOOR))
    r = (1 + a) / 2
    return (r * losses[0] + (1 - r) * losses[1]) / beta


WEIGHTS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "equal": lambda wrong, t: torch.ones_like(t),
    # of clean predictions, over their mean absolute error (AdvantageFlow, DiffusionNFT)
    "error": lambda wrong, t: t.square() / (t * mean(wrong.abs())).clamp(min=FLOOR),
    # the derivative of AWM's Huber loss of the squared error
    "huber": lambda wrong, t: t * (mean(wrong.square()) + 1e-10) ** (HUBER - 1),
}
"""weight(v - v* without gradient [N, ...], t [N]) -> [N], by `MatchingSettings.weight`."""


def mean(values: torch.Tensor) -> torch.Tensor:
    """Return the mean over all elements but the batch: [N, ...] -> [N]."""
    return values.flatten(1).mean(1)


def _like(values: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    return values.view(-1, *(1,) * (other.ndim - 1))


class VelocityMatching:
    """The objective of a run on noised images: draws times and noise, and computes the loss.

    sigmas: [T+1] of the sampler. See `objective.PolicyGradient`.
    """

    def __init__(self, settings: MatchingSettings, credit: CreditAssignment, sigmas: torch.Tensor):
        self.settings, self.credit, self.sigmas = settings, credit, sigmas

    def advantages(
        self, sampled: Rollout, rewards: torch.Tensor, gains: Sequence[torch.Tensor] | None
    ) -> list[torch.Tensor]:
        """Return the advantages [P, G] of the images of every branch and granularity.

        Collective if the deviation is the batch's.
        """
        return list(self.credit.of_images(rewards).unbind(1))

    def updates(
        self, sampled: Rollout, advantages: Sequence[torch.Tensor], draws: Draws, velocity: Velocity
    ) -> list[Update[NoisedBatch]]:
        """Return the optimizer steps of an iteration, each on its part of every group.

        velocity: as in `noised`.
        """
        noised = self.noised(sampled, advantages, draws, velocity)
        parts = [noised]
        if self.settings.updates_per_rollout > 1:
            members = parts_of_group(
                int(noised.member.max()) + 1, self.settings.updates_per_rollout
            )
            parts = [
                noised.rows((noised.member >= part.start) & (noised.member < part.stop))
                for part in members
            ]
        return [Update([part], len(part), f"{len(part)} noised images") for part in parts]

    def noised(
        self, sampled: Rollout, advantages: Sequence[torch.Tensor], draws: Draws, velocity: Velocity
    ) -> NoisedBatch:
        """Noise the images K times, with a generator per prompt.

        velocity: of the old policy; called only if its velocities are kept.
        """
        settings, of_images = self.settings, torch.stack(list(advantages), 1)  # [P, S, G]
        clean = sampled.clean.flatten(1, 2)  # [P, S, G, ...]
        latent, groups, members = clean.shape[3:], clean.shape[1], clean.shape[2]
        sigmas, noises = [], []
        for index in draws.prompts:
            generator = draws.generator(index)
            # With one draw for the group, what equal images share cancels in their advantages' sum
            images = 1 if settings.shared else groups * members
            times = torch.stack([self._times(generator) for _ in range(images)])  # [images, K]
            noise = torch.randn(images, settings.times, *latent, generator=generator)
            sigmas.append(times.expand(groups * members, -1))
            noises.append(noise.expand(groups * members, *noise.shape[1:]))
        # Rows: prompt, group, member, time
        device, shape = clean.device, (*clean.shape[:3], settings.times)
        every = lambda tensor: tensor.unsqueeze(3).expand(*shape, *tensor.shape[3:]).flatten(0, 3)
        scale, limit = settings.advantage_scale, settings.advantage_limit or math.inf
        batch = NoisedBatch(
            clean=every(clean),
            noise=torch.stack(noises).flatten(0, 2).to(device),
            sigma=torch.stack(sigmas).flatten().to(device),
            advantages=every((of_images * scale).clamp(-limit, limit))[:, None],
            weights=every(torch.ones_like(of_images))[:, None],
            prompt=every(
                torch.arange(len(clean), device=device)[:, None, None].expand(clean.shape[:3])
            ),
            member=every(torch.arange(members, device=device).expand(clean.shape[:3])),
        )
        # At the first and only update the old velocity is the current one, detached: no second call
        if not settings.keeps_old:
            return batch
        with torch.no_grad():
            return replace(batch, old=velocity(batch.latents, batch.sigma, batch.prompt))

    def _times(self, generator: torch.Generator) -> torch.Tensor:
        """Draw K times [K] of one image."""
        (first, last), count = self.settings.share, self.settings.times
        if self.settings.draw in ("uniform", "linear"):
            # Inverse transform sampling within the share; a density of 2t has the distribution t^2
            power = 2 if self.settings.draw == "linear" else 1
            high, low = (1 - first) ** power, (1 - last) ** power
            return (high - (high - low) * torch.rand(count, generator=generator)) ** (1 / power)
        steps = len(self.sigmas) - 1
        start = min(math.ceil(first * steps), steps - 1)  # the last one before sigma 0
        candidates = torch.arange(start, max(math.floor(last * steps), start + 1))
        if self.settings.draw == "grid":
            found = candidates[torch.randperm(len(candidates), generator=generator)[:count]]
            # more times than sigmas begin over again
            found = found.repeat(-(-count // len(found)))[:count]
        else:
            parts = [part for part in candidates.tensor_split(count) if len(part)]
            found = torch.stack(
                [part[torch.randint(len(part), (), generator=generator)] for part in parts]
            )
            found = found.repeat(-(-count // len(found)))[:count]
        return self.sigmas.cpu()[found]

    def losses(self, velocity: Velocity, reference: Velocity | None, batch: NoisedBatch) -> Losses:
        """Compute the losses of a batch: a forward of `velocity`, and of `reference` if given.

        reference: of the model before training.
        """
        settings, t, a = self.settings, batch.sigma, batch.advantages[:, 0]
        arguments = (batch.latents, t, batch.prompt)
        v = velocity(*arguments)
        old, target = v.detach() if batch.old is None else batch.old, batch.target
        before = None
        if reference:
            with torch.no_grad():
                before = reference(*arguments)
        # The loss, and the distances to the slow copy and to the model before training. The weight
        # has no gradient: it would reward a large error
        weight = WEIGHTS[settings.weight](v.detach() - target, t)
        if settings.loss == "branches":
            loss = branches(v, old, target, t, a, settings.trust)
        else:
            anchor = old if settings.anchor == "old" or before is None else before
            loss = quadratic(v, anchor, old, target, a, settings.trust + a * settings.signed)
        distance = mean((v - old).square())
        kl = torch.zeros_like(loss) if before is None else mean((v - before).square())
        policy = settings.factor * weight * loss
        total = (
            policy
            + settings.old_coef * distance
            + settings.kl_coef * (weight if settings.kl_weighted else 1.0) * kl
        )
        sums = {
            "loss": policy,
            "kl": kl,
            "old_deviation": distance,
            "velocity_error": mean((v - target).square()),
        }
        return Losses(
            batch.weights * total[:, None],
            {name: value.detach().sum() for name, value in sums.items()},
        )
