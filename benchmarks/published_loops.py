"""Run the published training loops, written again for measuring: batch 1, nothing shared, every image on its own path.

They follow the design of G2RPO's, MixGRPO's and DanceGRPO's loops, not their code: the whole
schedule is sampled once for the anchor; every member evaluates the SDE step again; every
granularity runs its tail from there; images are decoded and scored one at a time; every transition
has a forward and backward of its own, but G2RPO's members share theirs. DiffusionNFT's loop
samples, decodes and scores a batch of images at once, and trains on one time after the other, with
three forwards for each.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch

from g2rpo_core.algorithm.advantage import branch_advantages
from g2rpo_core.algorithm.loss import clipped_loss, ratio
from g2rpo_core.data.embeddings import Conditioning
from g2rpo_core.models.policy import Policy
from g2rpo_core.rewards.spec import Reward
from g2rpo_core.sampling.schedule import sigma_at, tail
from g2rpo_core.training.trainer import Trainer


class PublishedIteration:
    """One iteration of a method for one prompt, with the noise of `RolloutSampler`; `num_forward_evals` counts its rollout's.

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
        self.trainer, self.policy, self.method = trainer, trainer.policy, trainer.method
        self.sigma_of = partial(
            sigma_at, steps=trainer.sampling.steps, shift=trainer.sampling.shift
        )
        self.velocity, self.initial, self.noises = (
            self._counted(self.policy, conditioning),
            initial,
            noises,
        )
        self.num_forward_evals = 0
        self.transitions: dict[
            tuple[int, int], tuple
        ] = {}  # (SDE step, member) -> step, latents, next latents, log-probability

    def _counted(
        self, policy: Policy, conditioning: Conditioning
    ) -> Callable[[torch.Tensor, float], torch.Tensor]:
        velocity, prompt = (
            policy.velocity(conditioning),
            torch.zeros(1, dtype=torch.int64, device=policy.device),
        )

        def velocity_at(x: torch.Tensor, step: float) -> torch.Tensor:
            self.num_forward_evals += (
                torch.is_inference_mode_enabled() or not torch.is_grad_enabled()
            )
            return velocity(x[None], x.new_full((1,), self.sigma_of(step)), prompt)[0]

        return velocity_at

    @torch.no_grad()
    def sample(self) -> torch.Tensor:
        """Sample clean latents [B, J, G, ...]."""
        steps, sigma_of, group = self.trainer.sampling.steps, self.sigma_of, len(self.noises[0])
        branches = self.method.tree.branches(steps)
        # The anchor: the whole schedule once
        anchor = [self.initial]
        if self.method.tree.branching == "each":
            for step in range(steps):
                anchor.append(
                    anchor[-1]
                    + self.velocity(anchor[-1], step) * (sigma_of(step + 1) - sigma_of(step))
                )
        clean, before = [], 0  # SDE steps of the branches before
        for sde_steps in branches:
            members = []
            for member in range(group):
                start = sde_steps[0] if self.method.tree.branching == "each" else 0
                # SDE steps of a member, from the anchor
                x = anchor[start]
                for step in range(start, sde_steps[-1] + 1):
                    v = self.velocity(x, step)
                    if step not in sde_steps:
                        x = x + v * (sigma_of(step + 1) - sigma_of(step))
                        continue
                    index = before + sde_steps.index(step)
                    transition = self.trainer.sampler.transition(x[None], v[None], step=step)
                    following = transition.sample(self.noises[index][member][None])
                    self.transitions[index, member] = (
                        step,
                        x,
                        following[0],
                        transition.log_prob(following)[0],
                    )
                    x = following[0]
                # Its tails, one per granularity
                ends = []
                for granularity in self.method.tree.granularities:
                    end, path = (
                        x,
                        [*tail(steps, sde_steps[-1], granularity, self.method.tree.grid), steps],
                    )
                    for tail_step, following_step in zip(path, path[1:]):
                        end = end + self.velocity(end, tail_step) * (
                            sigma_of(following_step) - sigma_of(tail_step)
                        )
                    ends.append(end)
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
            text = (
                prompt + " " * number
            )  # the same tokens, but not found among the encodings that a scorer keeps
            scores.append(torch.stack([reward(image, [text])[0] for reward in rewards.values()]))
        return torch.stack(scores, 1).view(len(rewards), 1, *clean.shape[:3])

    def update(self, scores: torch.Tensor, chosen: Sequence[int]) -> None:
        """Compute the gradients of the whole iteration, one forward and backward after the other, and step the optimizer."""
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


class PublishedNoisedIteration:
    """One iteration of DiffusionNFT for one prompt; `num_forward_evals` counts its rollout's.

    trainer: has policy, method and settings; initial: x_T [G, ...] of the images, which are one
    batch.
    """

    def __init__(self, trainer: Trainer, conditioning: Conditioning, initial: torch.Tensor):
        self.trainer, self.initial = trainer, initial
        self.velocity, self.base = (
            trainer.policy.velocity(conditioning),
            trainer.policy.base_velocity(conditioning),
        )
        self.prompt = torch.zeros(len(initial), dtype=torch.int64, device=initial.device)
        self.num_forward_evals = 0

    @torch.no_grad()
    def sample(self) -> torch.Tensor:
        """Sample clean latents [G, ...] by the second-order multistep solver, as written for data prediction."""
        x, before, sigmas = self.initial, None, self.trainer.sampler.sigmas.tolist()
        log_snr = [math.log((1 - sigma) / sigma) if 0 < sigma < 1 else None for sigma in sigmas]
        for index, sigma in enumerate(sigmas[:-1]):
            clean = x - sigma * self.velocity(x, x.new_full((len(x),), sigma), self.prompt)
            self.num_forward_evals += len(x)
            around = log_snr[max(0, index - 1)], log_snr[index], log_snr[index + 1]
            estimate = clean
            if None not in around and before is not None:
                estimate = (
                    clean + (around[2] - around[1]) / (around[1] - around[0]) * (clean - before) / 2
                )
            x = sigmas[index + 1] / sigma * x + (1 - sigmas[index + 1] / sigma) * estimate
            before = clean
        return x

    @torch.no_grad()
    def score(
        self, clean: torch.Tensor, rewards: Mapping[str, Reward], prompt: str
    ) -> torch.Tensor:
        """Decode and score the images: [R, G]."""
        images = self.trainer.policy.decode(clean, len(clean))
        return torch.stack([reward(images, [prompt] * len(images)) for reward in rewards.values()])

    def update(
        self, clean: torch.Tensor, scores: torch.Tensor, sigmas: torch.Tensor, noise: torch.Tensor
    ) -> None:
        """Compute the gradients of the iteration, one time of every image after the other, and step the optimizer.

        sigmas: times [G, K]; noise [G, K, ...]. The slow policy has the trained weights, as in the
        first iteration.
        """
        training, settings = self.trainer.training, self.trainer.method.objective
        weights = scores.new_tensor([training.rewards[name] for name in self.trainer.rewards])
        total = (weights[:, None] * scores).sum(0)
        advantages = (total - total.mean()) / (total.std(correction=0) + 1e-4)
        r = (advantages.clamp(-5, 5) / 5 / 2 + 0.5).clamp(0, 1)
        mean = lambda values: values.flatten(1).mean(1)
        self.trainer.optimizer.zero_grad()
        for k in range(sigmas.shape[1]):
            t, eps = sigmas[:, k].contiguous(), noise[:, k]
            wide = t.view(-1, *(1,) * (clean.ndim - 1))
            x = (1 - wide) * clean + wide * eps
            with torch.no_grad():
                old, before = self.velocity(x, t, self.prompt), self.base(x, t, self.prompt)
            v, beta, losses = self.velocity(x, t, self.prompt), settings.trust, []
            for branch in (beta * v + (1 - beta) * old, (1 + beta) * old - beta * v):
                wrong = x - wide * branch - clean
                losses.append(
                    mean(wrong.square())
                    / mean(wrong.detach().double().abs()).clamp(min=1e-5).float()
                )
            policy = 5 * (r * losses[0] + (1 - r) * losses[1]) / beta
            (
                (policy + settings.kl_coef * mean((v - before).square())).mean() / sigmas.shape[1]
            ).backward()
        torch.nn.utils.clip_grad_norm_(self.trainer.parameters, training.max_grad_norm)
        self.trainer.optimizer.step()
