"""The published training loops, written anew for measuring: batch 1, nothing shared, every picture on its own way.

As G2RPO's, MixGRPO's and DanceGRPO's code runs them (design of their loops, not their code): the whole schedule is sampled once
for the anchor; every member evaluates the noisy step again; every granularity runs its tail from there; pictures are decoded and
scored one at a time; every transition has a forward and backward of its own, but that G2RPO's members share theirs.
"""

from collections.abc import Mapping, Sequence

import torch

from g2rpo_core.embeddings import Conditioning
from g2rpo_core.objective import clipped_loss, ratio
from g2rpo_core.policy import Policy
from g2rpo_core.rewards import Reward
from g2rpo_core.rollout import Velocity
from g2rpo_core.schedule import tail
from g2rpo_core.trainer import Trainer, advantages_of


class PublishedIteration:
    """One iteration of a method for one prompt, with the noise of `Trainer.sample`; counts the evaluations in `evaluations`.

    trainer: has policy, method and settings; initial: x_T [...]; noises: for every noisy step of all branches [G, ...].
    """

    def __init__(self, trainer: Trainer, conditioning: Conditioning, initial: torch.Tensor, noises: Sequence[torch.Tensor]):
        self.trainer, self.policy, self.method = trainer, trainer.policy, trainer.method
        self.velocity, self.initial, self.noises = self._counted(self.policy, conditioning), initial, noises
        self.evaluations = 0
        self.taken: dict[tuple[int, int], tuple] = {}  # (decision, member) -> step, latents, next latents, log-probability

    def _counted(self, policy: Policy, conditioning: Conditioning) -> Velocity:
        velocity, prompt = policy.velocity(conditioning), torch.zeros(1, dtype=torch.int64, device=policy.device)

        def one(x: torch.Tensor, step: int) -> torch.Tensor:
            self.evaluations += torch.is_inference_mode_enabled() or not torch.is_grad_enabled()
            return velocity(x[None], x.new_full((1,), self.trainer.level(step)), prompt)[0]

        return one

    @torch.no_grad()
    def sample(self) -> torch.Tensor:
        """Clean latents [B, J, G, ...]."""
        steps, level, group = self.trainer.sampling.steps, self.trainer.level, len(self.noises[0])
        branches = self.method.branches(steps)
        anchor = [self.initial]
        if self.method.branching == "each":
            for step in range(steps):
                anchor.append(anchor[-1] + self.velocity(anchor[-1], step) * (level(step + 1) - level(step)))
        clean, decision = [], 0
        for noisy in branches:
            members = []
            for member in range(group):
                start = noisy[0] if self.method.branching == "each" else 0
                x = anchor[start]
                for step in range(start, noisy[-1] + 1):
                    v = self.velocity(x, step)
                    if step not in noisy:
                        x = x + v * (level(step + 1) - level(step))
                        continue
                    place = decision + noisy.index(step)
                    transition = self.trainer.transition(x[None], v[None], step=step)
                    following = transition.sample(self.noises[place][member][None])
                    self.taken[place, member] = (step, x, following[0], transition.log_prob(following)[0])
                    x = following[0]
                ends = []
                for granularity in self.method.granularities:
                    end, path = x, [*tail(steps, noisy[-1], granularity, self.method.grid), steps]
                    for here, there in zip(path, path[1:]):
                        end = end + self.velocity(end, here) * (level(there) - level(here))
                    ends.append(end)
                members.append(torch.stack(ends))
            clean.append(torch.stack(members, 1))
            decision += len(noisy)
        return torch.stack(clean)

    @torch.no_grad()
    def score(self, clean: torch.Tensor, rewards: Mapping[str, Reward], prompt: str) -> torch.Tensor:
        """[R, 1, B, J, G]: each picture decoded and scored by itself, its prompt encoded anew."""
        scores = []
        for number, latents in enumerate(clean.flatten(0, 2)):
            picture = self.policy.decode(latents[None], 1)
            text = prompt + " " * number  # the same tokens, but not found among the encodings that a scorer keeps
            scores.append(torch.stack([reward(picture, [text])[0] for reward in rewards.values()]))
        return torch.stack(scores, 1).view(len(rewards), 1, *clean.shape[:3])

    def update(self, scores: torch.Tensor, chosen: Sequence[int]) -> None:
        """Gradients of the whole iteration, one forward and backward after the other, and the optimizer's step."""
        training = self.trainer.training
        advantages = advantages_of(scores, list(training.rewards.values()), training.advantage_clip)[0]
        branch_of = [branch for branch, noisy in enumerate(self.method.branches(self.trainer.sampling.steps)) for _ in noisy]
        group = len(self.noises[0])
        self.trainer.optimizer.zero_grad()
        for place in chosen:
            members = [self.taken[place, member] for member in range(group)]
            shared = self.method.branching == "each"
            parts = [range(group)] if shared else [[member] for member in range(group)]
            for part in parts:
                step, latents, _, _ = members[part[0]]
                current = self.trainer.transition(latents[None], self.velocity(latents, step)[None], step=step)
                loss = sum(
                    clipped_loss(
                        ratio(current.log_prob(members[member][2][None])[0], members[member][3]),
                        advantages[branch_of[place], member],
                        training.clip_range,
                    )
                    for member in part
                )
                (loss / (len(chosen) * group)).backward()
        torch.nn.utils.clip_grad_norm_(self.trainer.parameters, training.max_grad_norm)
        self.trainer.optimizer.step()
