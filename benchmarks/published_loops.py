"""The published training loops, rewritten to be measured: batch 1, nothing shared.

They follow the design of G2RPO's, MixGRPO's and DanceGRPO's loops, not their code: the anchor
samples the whole schedule once; every member evaluates the SDE step again; every granularity runs
its tail from there; images are decoded and scored one at a time; every transition has its own
forward and backward, except that G2RPO's members share theirs.
"""

from collections.abc import Mapping, Sequence
from functools import partial, reduce
from itertools import pairwise

import torch

from g2rpo_core.algorithm.advantage import branch_advantages
from g2rpo_core.algorithm.loss import clipped_loss, ratio
from g2rpo_core.data.embeddings import Conditioning
from g2rpo_core.rewards.spec import Reward
from g2rpo_core.sampling.schedule import sigma_at, tail
from g2rpo_core.training.trainer import Trainer


class PublishedIteration:
    """One iteration of a method for one prompt, with the noise of `RolloutSampler`.

    `num_forward_evals` counts those of its rollout.

    trainer: has policy, method and settings; initial: x_T [...]; noises: for every SDE step of all
    branches [G, ...].
    """

    def __init__(
        self,
        trainer: Trainer,
        conditioning: Conditioning,
        initial: torch.Tensor,
        noises: Sequence[torch.Tensor],
    ):
        policy = self.policy = trainer.policy
        self.trainer, self.method = trainer, trainer.method
        self.sigma_of = partial(
            sigma_at, steps=trainer.sampling.steps, shift=trainer.sampling.shift
        )
        self.field, self.initial, self.noises = policy.velocity(conditioning), initial, noises
        self.prompt = torch.zeros(1, dtype=torch.int64, device=policy.device)
        self.num_forward_evals = 0
        # (SDE step, member) -> step, latents, next latents, log-probability
        self.transitions: dict[tuple[int, int], tuple] = {}

    def velocity(self, x: torch.Tensor, step: float) -> torch.Tensor:
        """Evaluate one latent, and count it unless it is trained on."""
        self.num_forward_evals += not torch.is_grad_enabled()
        return self.field(x[None], x.new_full((1,), self.sigma_of(step)), self.prompt)[0]

    def follow(self, x: torch.Tensor, step: float, following: float) -> torch.Tensor:
        """Take one ODE step."""
        return x + self.velocity(x, step) * (self.sigma_of(following) - self.sigma_of(step))

    @torch.no_grad()
    def sample(self) -> torch.Tensor:
        """Sample clean latents [B, J, G, ...]."""
        steps, tree = self.trainer.sampling.steps, self.method.tree
        # The anchor: the whole schedule once
        anchor = [self.initial]
        if tree.branching == "each":
            for step in range(steps):
                anchor.append(self.follow(anchor[-1], step, step + 1))
        clean, before = [], 0  # SDE steps of the branches before
        for sde_steps in tree.branches(steps):
            members = []
            for member in range(len(self.noises[0])):
                start = sde_steps[0] if tree.branching == "each" else 0
                # SDE steps of a member, from the anchor
                x = anchor[start]
                for step in range(start, sde_steps[-1] + 1):
                    if step not in sde_steps:
                        x = self.follow(x, step, step + 1)
                        continue
                    index, v = before + sde_steps.index(step), self.velocity(x, step)
                    transition = self.trainer.sampler.transition(x[None], v[None], step=step)
                    following = transition.sample(self.noises[index][member][None])
                    log_prob = transition.log_prob(following)[0]
                    self.transitions[index, member] = step, x, following[0], log_prob
                    x = following[0]
                # Its tails, one per granularity
                ends = []
                for granularity in tree.granularities:
                    path = [*tail(steps, sde_steps[-1], granularity, tree.grid), steps]
                    ends.append(
                        reduce(lambda end, pair: self.follow(end, *pair), pairwise(path), x)
                    )
                members.append(torch.stack(ends))
            clean.append(torch.stack(members, 1))
            before += len(sde_steps)
        return torch.stack(clean)

    @torch.no_grad()
    def score(
        self, clean: torch.Tensor, rewards: Mapping[str, Reward], prompt: str
    ) -> torch.Tensor:
        """Decode and score each image by itself, its prompt encoded again: [R, 1, B, J, G]."""
        scores = []
        for number, latents in enumerate(clean.flatten(0, 2)):
            image = self.policy.decode(latents[None], 1)
            # The same tokens, but not found among the encodings that a scorer keeps
            text = prompt + " " * number
            scores.append(torch.stack([reward(image, [text])[0] for reward in rewards.values()]))
        return torch.stack(scores, 1).view(len(rewards), 1, *clean.shape[:3])

    def update(self, scores: torch.Tensor, chosen: Sequence[int]) -> None:
        """Compute the iteration's gradients, one transition after the other, and step."""
        training = self.trainer.training
        weights = [training.rewards[name] for name in self.trainer.rewards]
        advantages = branch_advantages(scores, weights, training.adv_clip_max)[0]
        branches = self.method.tree.branches(self.trainer.sampling.steps)
        branch_of = [branch for branch, sde_steps in enumerate(branches) for _ in sde_steps]
        group = len(self.noises[0])
        self.trainer.optimizer.zero_grad()
        for index in chosen:
            members = [self.transitions[index, member] for member in range(group)]
            shared = self.method.tree.branching == "each"
            parts = [range(group)] if shared else [[member] for member in range(group)]
            for part in parts:
                step, latents, _, _ = members[part[0]]
                current = self.trainer.sampler.transition(
                    latents[None], self.velocity(latents, step)[None], step=step
                )
                loss = sum(
                    clipped_loss(
                        ratio(current.log_prob(members[member][2][None])[0], members[member][3]),
                        advantages[branch_of[index], member],
                        training.clip_range,
                    )
                    for member in part
                )
                (loss / (len(chosen) * group)).backward()
        torch.nn.utils.clip_grad_norm_(self.trainer.parameters, training.max_grad_norm)
        self.trainer.optimizer.step()
