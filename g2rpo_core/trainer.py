"""Online RL of a policy: roll out groups, score them, step on the clipped objective; any method, one loop."""

import math
import random
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Literal

import torch
from torch.distributed.tensor import DTensor

from .advantage import group_advantages, standardized
from .config import SamplingSettings, TrainingSettings
from .dynamics import Transition
from .embeddings import Conditioning, EmbeddingStore
from .errors import UserError
from .methods import Method
from .objective import clipped_loss, normalized_ratio, ratio
from .parallel import apply_ac
from .policy import Policy
from .prompts import visits
from .randomness import generator, seed_of
from .rewards import Reward, judge_all
from .rollout import Rollout, Taken, Velocity, prompt_of_rows, rollout
from .schedule import shifted_sigmas, sigma_at
from .termination import Terminated, Termination
from .tree import build
from .world import World


class NonFiniteError(UserError):
    """Latents, a reward, loss or gradient that is not a number, or a ratio that drifted; the text names iteration, prompt and reward."""


@dataclass(frozen=True)
class Rows:
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

    def split(self, size: int) -> Iterator["Rows"]:
        """Parts of at most `size` states."""
        for parts in zip(*(getattr(self, field).split(size) for field in self.__dataclass_fields__)):
            yield Rows(*parts)


class Trainer:
    """Trains `policy.transformer` in place.

    rewards: those that `training.rewards` weighs, in its order; prompts: the encoded training prompts; seed: decides the order of the
    prompts, all noise and the drawn steps. world: each process takes its share of every iteration's prompts, whole groups; what it
    samples depends on the prompt's place among all, so that any number of processes computes the same.
    """

    def __init__(
        self,
        policy: Policy,
        method: Method,
        sampling: SamplingSettings,
        training: TrainingSettings,
        prompts: EmbeddingStore,
        rewards: Mapping[str, Reward],
        seed: int,
        world: World = World(),  # noqa: B008
        termination: Termination | None = None,
    ):
        self.policy, self.method, self.sampling, self.training = policy, method, sampling, training
        self.prompts, self.rewards, self.seed = prompts, rewards, seed
        self.world, self.termination = world, termination or Termination()
        self.untouched = True  # whether the weights are those with which the iteration began
        self.sigmas = shifted_sigmas(sampling.steps, sampling.shift).to(policy.device)
        self.transition = method.transition(self.sigmas)
        self.level = partial(sigma_at, steps=sampling.steps, shift=sampling.shift)
        self.parameters = list(policy.trained_parameters().values())
        self.optimizer = torch.optim.AdamW(self.parameters, training.learning_rate, weight_decay=training.weight_decay)
        policy.transformer.train()
        if training.checkpointing:
            apply_ac(policy.transformer)
        if method.kl:
            policy.keep_base()

    def run(
        self, last: Mapping = MappingProxyType({"iteration": 0, "evaluations": 0, "trained": 0, "seconds": 0.0})
    ) -> Iterator[dict]:
        """The record of each iteration after that of the record `last`, after its update.

        The iteration's number decides its prompts, noise, window and learning rate: weights and optimizer (`state`) are all else
        that a resumed run needs. Terminated where SIGTERM was received, before anything of the iteration changed the weights.

        A record has the iteration (from 1), the `evaluations` of the transformer in rollouts, the states `trained` on and the
        `seconds`, all so far; of every reward the mean and the mean deviation within a group, and with several granularities what
        `agreement` says; the share of `clamped` advantages, loss, gradient norm, the largest |ratio - 1| before the first update (`ratio_drift`) and the share of clipped ratios.
        """
        evaluations, trained, seconds = last["evaluations"], last["trained"], last["seconds"]
        world = self.world
        for iteration in range(last["iteration"], self.training.iterations):
            start = time.perf_counter()
            self.untouched = True
            if self.training.schedule == "linear":
                self.optimizer.param_groups[0]["lr"] = self.training.learning_rate * (1 - iteration / self.training.iterations)
            places = world.share(self.training.prompts_per_iteration)
            indices = visits(iteration, self.training.prompts_per_iteration, len(self.prompts), self.seed)
            indices = [indices[place] for place in places]
            conditioning = self.prompts.conditioning(indices)
            sampled = self.sample(conditioning, iteration, places.start)
            scores = self.score(sampled, [self.prompts.prompts[index].text for index in indices], iteration)
            advantages = advantages_of(scores, list(self.training.rewards.values()), self.training.advantage_clip)
            chosen = self.method.trained(len(sampled.taken), random.Random(seed_of("trained", self.seed, iteration)))
            taken = [sampled.taken[index] for index in chosen]
            self._stop_if_asked()
            try:
                steps = [self.update(conditioning, *update) for update in updates_of(taken, advantages, self.method.updates)]
            except NonFiniteError as error:
                prompts = ", ".join(repr(self.prompts.prompts[index].text) for index in indices)
                raise NonFiniteError(f"iteration {iteration + 1}: {error}; the prompts are {prompts}") from None
            self.policy.refresh()
            evaluations += sampled.evaluations * world.size
            trained += sum(step["states"] for step in steps) * world.size
            means = {
                **{f"reward_{name}": score.mean().item() for name, score in zip(self.rewards, scores)},
                **{f"spread_{name}": score.std(-1).mean().item() for name, score in zip(self.rewards, scores)},
                **agreement(scores, list(self.rewards), self.method.granularities),
                "clamped": (advantages.abs() >= self.training.advantage_clip).float().mean().item(),
            }
            means = dict(zip(means, world.mean(list(means.values()))))
            seconds += time.perf_counter() - start  # what the caller does between iterations does not count
            yield {
                "iteration": iteration + 1,
                "evaluations": evaluations,
                "trained": trained,
                "seconds": seconds,
                **means,
                "ratio_drift": steps[0]["ratio_drift"],
                **{key: sum(step[key] for step in steps) / len(steps) for key in ("loss", "kl", "grad_norm", "clip_share")},
            }

    def state(self) -> dict:
        """This process's part of what the iterations change: weights that are trained, and the optimizer's moments."""
        moments = [self.optimizer.state.get(parameter, {}) for parameter in self.parameters]
        return {
            "weights": [local(parameter.detach()) for parameter in self.parameters],
            "moments": [{name: local(value) for name, value in one.items()} for one in moments],
        }

    @torch.no_grad()
    def restore(self, state: dict) -> None:
        """Puts a `state` back, bit for bit."""
        for parameter, weight, moments in zip(self.parameters, state["weights"], state["moments"]):
            local(parameter).copy_(weight)
            for name, value in moments.items():
                if value.dim():  # the count of steps is a number on the CPU; the others are laid out as the parameter
                    local(moment := torch.zeros_like(parameter)).copy_(value)
                    self.optimizer.state[parameter][name] = moment
                else:
                    self.optimizer.state[parameter][name] = value.clone()
        self.policy.refresh()

    def _stop_if_asked(self) -> None:
        if self.world.first("asked" if self.termination.requested else None):
            raise Terminated

    def sample(self, conditioning: Conditioning, iteration: int, first: int = 0) -> Rollout:
        """The rollout of one iteration; seed, iteration and the prompt's place, from `first` on, decide its noise, nothing else."""
        method, steps = self.method, self.sampling.steps
        tree = build(method.branches(steps, iteration, self.seed), method.granularities, steps, method.grid)
        generators = [
            generator("rollout", self.seed, iteration, place) for place in range(first, first + len(conditioning.pooled))
        ]
        initial = torch.stack([self.policy.noise(one) for one in generators])
        group = self.training.group_size
        noises = [torch.stack([self.policy.noise(one, group) for one in generators]) for _ in tree.decisions]
        max_batch = self.policy.batch_size(self.sampling.batch_tokens, conditioning)
        field = self.policy.sampling_velocity(conditioning)

        def velocity(*arguments: torch.Tensor) -> torch.Tensor:
            self._stop_if_asked()  # nothing has changed the weights yet, so a checkpoint can be written here
            return field(*arguments)

        return rollout(velocity, tree, self.level, self.transition, initial, noises, max_batch, method.solver)

    @torch.no_grad()
    def score(self, sampled: Rollout, texts: list[str], iteration: int) -> torch.Tensor:
        """[R, P, B, J, G]: every reward of every picture of a rollout; NonFiniteError names prompt and reward.

        One prompt's pictures at a time: those of the paper's 16 prompts on one GPU would be 59 GiB.
        """
        shape = sampled.clean.shape[:4]
        each = math.prod(shape[1:])
        judged = [
            judge_all(self.rewards, self.policy.decode(clean.flatten(0, 2), self.sampling.decode_batch), [text] * each)
            for clean, text in zip(sampled.clean, texts)
        ]
        prompts = [text for text in texts for _ in range(each)]
        scores = torch.cat([one.values for one in judged], 1)
        reasons = [[reason for part in of_reward for reason in part] for of_reward in zip(*(one.reasons for one in judged))]
        why = dict(zip((f"reward {name}" for name in self.rewards), reasons))
        values = {
            "latents": sampled.clean.flatten(0, 3).flatten(1).sum(1).cpu(),
            **dict(zip((f"reward {name}" for name in self.rewards), scores)),
        }
        problem = None
        for name, one in values.items():
            if not one.isfinite().all():
                place = int((~one.isfinite()).nonzero()[0])
                what = f"{name} is {one[place].item()}" if name != "latents" else "latents are not finite"
                reason = f": {why[name][place]}" if name in why and why[name][place] else ""
                problem = problem or f"iteration {iteration + 1}: {what} for the prompt {prompts[place]!r}{reason}"
        if problem := self.world.first(problem):
            raise NonFiniteError(problem)
        return scores.view(-1, *shape)

    def update(self, conditioning: Conditioning, taken: list[Taken], advantages: torch.Tensor) -> dict:
        """One optimizer step on the mean loss over all given transitions, in as many batches as it takes (Eq. 12)."""
        batches = rows_of(taken, advantages)
        total = sum(batch.advantages.numel() for batch in batches)
        size = self.policy.batch_size(self.training.batch_tokens, conditioning)
        velocity = self.policy.velocity(conditioning)
        base = self.policy.base_velocity(conditioning) if self.method.kl else None
        sums = []
        self.optimizer.zero_grad()
        for rows in (part for batch in batches for part in batch.split(size)):
            r, loss = self._policy_loss(current := self._transition(velocity, rows), rows)
            kl = torch.zeros_like(loss)
            if base:
                with torch.no_grad():
                    reference = self._transition(base, rows)
                kl = current.kl(reference)[:, None].expand_as(loss)
            ((loss + self.method.kl * kl).sum() / total).backward()
            away = (r.detach() - 1).abs()
            clipped = (away > self.training.clip_range).sum()
            sums.append(torch.stack([loss.detach().sum(), kl.detach().sum(), clipped, away.max()]))
        loss_sum, kl_sum, clipped, _ = self.world.mean(torch.stack(sums).sum(0).div(total).tolist())
        drift = max(self.world.gather(torch.stack(sums)[:, 3].max().item()))
        norm = torch.nn.utils.clip_grad_norm_(self.parameters, self.training.max_grad_norm)
        norm = (norm.full_tensor() if isinstance(norm, DTensor) else norm).item()
        if not (math.isfinite(loss_sum) and math.isfinite(norm)):
            steps = [one.decision.step for one in taken]
            raise NonFiniteError(f"loss {loss_sum} with gradient norm {norm} at the noisy steps {steps}; nothing was updated")
        if self.untouched and drift > self.training.max_ratio_drift:
            raise NonFiniteError(
                f"|ratio - 1| is {drift:.2g} before the first update, over training.max_ratio_drift = {self.training.max_ratio_drift}: "
                "rollout and training do not compute the same"
            )
        self.untouched = False
        self.optimizer.step()
        return {
            "loss": loss_sum,
            "kl": kl_sum,
            "grad_norm": norm,
            "ratio_drift": drift,
            "clip_share": clipped,
            "states": sum(len(batch.latents) for batch in batches),
        }

    def _transition(self, velocity: Velocity, rows: Rows) -> Transition:
        """The transitions from all N states under a velocity field: one forward."""
        return self.transition(rows.latents, velocity(rows.latents, self.sigmas[rows.step], rows.prompt), step=rows.step)

    def _policy_loss(self, current: Transition, rows: Rows) -> tuple[torch.Tensor, torch.Tensor]:
        """Ratio and clipped loss of every transition, each [N, M]."""
        members = rows.next_latents.shape[1]
        log_prob = current.repeat(members).log_prob(rows.next_latents.flatten(0, 1)).view(-1, members)
        if self.method.ratio == "plain":
            r = ratio(log_prob, rows.old_log_prob)
            return r, clipped_loss(r, rows.advantages, self.training.clip_range)
        std = current.std.flatten(1)
        drift = current.kl(replace(current, mean=rows.mean))[:, None]
        r = normalized_ratio(log_prob, rows.old_log_prob, drift, std)
        length = (self.sigmas[rows.step] - self.sigmas[rows.step + 1])[:, None]  # GRPO-Guard evens out the steps' gradients by it
        return r, clipped_loss(r, rows.advantages, self.training.clip_range) / length


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This process's part of a tensor that is sharded, or the tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def agreement(scores: torch.Tensor, names: list[str], granularities: tuple[int, ...]) -> dict[str, float]:
    """How the same directions score at each granularity but the finest (the paper's Fig. 3), from rewards [R, P, B, J, G].

    `gap_<reward>_<granularity>`: its mean reward minus the finest's; `correlation_...`: with the finest's within a group, the mean
    over groups. A group whose rewards are all equal counts as a correlation of 0.
    """
    scaled, members = standardized(scores), scores.shape[-1]
    found = {}
    for place, granularity in list(enumerate(granularities))[1:]:
        for name, raw, score in zip(names, scores, scaled):
            together = (score[:, :, place] * score[:, :, 0]).sum(-1) / (members - 1)
            found[f"gap_{name}_{granularity}"] = (raw[:, :, place] - raw[:, :, 0]).mean().item()
            found[f"correlation_{name}_{granularity}"] = together.mean().item()
    return found


def advantages_of(scores: torch.Tensor, weights: list[float], clip: float) -> torch.Tensor:
    """Rewards [R, P, B, J, G] -> advantages [P, B, G]: each prompt's branch is a group of its own."""
    _, prompts, branches, _, group = scores.shape
    return group_advantages(scores.permute(0, 3, 1, 2, 4).flatten(2, 3), weights, clip).view(prompts, branches, group)


def updates_of(
    taken: list[Taken], advantages: torch.Tensor, updates: Literal["iteration", "step"] | int
) -> list[tuple[list[Taken], torch.Tensor]]:
    """The optimizer steps of an iteration: the transitions of each, with their advantages (see Method.updates)."""
    if updates == "iteration":
        return [(taken, advantages)]
    if updates == "step":
        return [([one], advantages) for one in taken]
    parts = torch.arange(advantages.shape[-1]).tensor_split(updates)
    slices = [slice(int(part[0]), int(part[-1]) + 1) for part in parts if len(part)]
    return [([one.members(members) for one in taken], advantages[..., members]) for members in slices]


def rows_of(taken: list[Taken], advantages: torch.Tensor) -> list[Rows]:
    """Transitions with their advantages [P, B, G], those with a state of their own and those that share one apart."""
    result = []
    for shared in (True, False):
        rows = []
        for one in taken:
            if (one.latents.shape[1] == 1) is not shared:
                continue
            prompts, group = one.log_prob.shape
            members = (prompts, group) if shared else (prompts * group, 1)
            prompt = prompt_of_rows(one.latents)
            rows.append(
                Rows(
                    latents=one.latents.flatten(0, 1),
                    mean=one.mean.flatten(0, 1),
                    next_latents=one.next_latents.reshape(*members, *one.next_latents.shape[2:]),
                    old_log_prob=one.log_prob.reshape(members),
                    advantages=advantages[:, one.decision.branch].reshape(members),
                    step=torch.full_like(prompt, one.decision.step),
                    prompt=prompt,
                )
            )
        if rows:
            result.append(Rows(*(torch.cat([getattr(row, field) for row in rows]) for field in Rows.__dataclass_fields__)))
    return result
