"""Online RL of a policy: roll out groups, score them, step on the clipped objective; any method, one loop."""

import math
import random
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from .advantage import group_advantages
from .config import SamplingSettings, TrainingSettings
from .dynamics import SDES
from .embeddings import EmbeddingStore
from .methods import Method
from .objective import clipped_loss, ratio
from .policy import Policy
from .prompts import visits
from .randomness import generator, seed_of
from .rewards import Reward, score_all
from .rollout import Rollout, Taken, Velocity, rollout
from .schedule import shifted_sigmas
from .tree import Tree, build


class NonFiniteError(Exception):
    """A loss, gradient or reward that is not a number; the text names iteration, prompt and reward."""


@dataclass(frozen=True)
class Rows:
    """Transitions to train on: N states, each with M sampled next states.

    latents: [N, ...]; next_latents: [N, M, ...]; old_log_prob, advantages: [N, M]; step, prompt: [N] int64.
    """

    latents: torch.Tensor
    next_latents: torch.Tensor
    old_log_prob: torch.Tensor
    advantages: torch.Tensor
    step: torch.Tensor
    prompt: torch.Tensor


def train(
    policy: Policy,
    method: Method,
    sampling: SamplingSettings,
    training: TrainingSettings,
    prompts: EmbeddingStore,
    rewards: Mapping[str, Reward],
    seed: int,
) -> Iterator[dict]:
    """Trains `policy.transformer` in place and yields the record of each iteration after its update.

    A record has the iteration (from 1), `evaluations` of the transformer in rollouts and `trained` transitions' forward passes so
    far, `seconds` so far, mean and within-group deviation of every reward, loss, gradient norm, the largest |ratio - 1| before the
    first update and the share of clipped ratios.
    """
    sigmas = shifted_sigmas(sampling.steps, sampling.shift).to(policy.device)
    tree = build(method.branches(sampling.steps), method.granularities, sampling.steps, method.grid)
    optimizer = torch.optim.AdamW(policy.transformer.parameters(), training.learning_rate, weight_decay=training.weight_decay)
    policy.transformer.train()
    evaluations = trained = 0
    start = time.perf_counter()
    for iteration in range(training.iterations):
        if training.schedule == "linear":
            optimizer.param_groups[0]["lr"] = training.learning_rate * (1 - iteration / training.iterations)
        indices = visits(iteration, training.prompts_per_iteration, len(prompts), seed)
        texts = [prompts.prompts[index].text for index in indices]
        velocity = policy.velocity(prompts.conditioning(indices))
        sampled = _sample_groups(policy, velocity, method, tree, sigmas, sampling, training, (seed, iteration), len(indices))
        scores = _score(policy, sampled, rewards, texts, sampling.max_batch, f"iteration {iteration + 1}")
        advantages = advantages_of(scores, list(training.rewards.values()), training.advantage_clip)
        chosen = method.trained(len(sampled.taken), random.Random(seed_of("trained", seed, iteration)))
        taken = [sampled.taken[index] for index in chosen]
        updates = [taken] if method.updates == "iteration" else [[one] for one in taken]
        steps = [
            _update(velocity, policy, method, sigmas, optimizer, update, advantages, sampling.max_batch, training)
            for update in updates
        ]
        evaluations += sampled.evaluations
        trained += sum(step["states"] for step in steps)
        yield {
            "iteration": iteration + 1,
            "evaluations": evaluations,
            "trained": trained,
            "seconds": time.perf_counter() - start,
            **{f"reward_{name}": score.mean().item() for name, score in zip(rewards, scores)},
            **{f"spread_{name}": score.std(-1).mean().item() for name, score in zip(rewards, scores)},
            "clamped": (advantages.abs() >= training.advantage_clip).float().mean().item(),
            "loss": sum(step["loss"] for step in steps) / len(steps),
            "grad_norm": sum(step["grad_norm"] for step in steps) / len(steps),
            "ratio_drift": steps[0]["ratio_drift"],
            "clip_share": sum(step["clip_share"] for step in steps) / len(steps),
        }


def _sample_groups(
    policy: Policy,
    velocity: Velocity,
    method: Method,
    tree: Tree,
    sigmas: torch.Tensor,
    sampling: SamplingSettings,
    training: TrainingSettings,
    name: tuple[int, int],
    prompts: int,
) -> Rollout:
    """The rollout of one iteration; `name` = (seed, iteration) and the prompt's place decide its noise, nothing else."""
    generators = [generator("rollout", *name, place) for place in range(prompts)]
    initial = torch.stack([policy.noise(one) for one in generators])
    noises = [torch.stack([policy.noise(one, training.group_size) for one in generators]) for _ in tree.decisions]
    return rollout(velocity, tree, sigmas, method.sde, method.eta, initial, noises, sampling.max_batch)


@torch.no_grad()
def _score(
    policy: Policy, sampled: Rollout, rewards: Mapping[str, Reward], texts: list[str], max_batch: int, where: str
) -> torch.Tensor:
    """[R, P, B, J, G]: every reward of every picture of a rollout; NonFiniteError names prompt and reward."""
    shape = sampled.clean.shape[:4]
    pictures = policy.decode(sampled.clean.flatten(0, 3), max_batch)
    prompts = [text for text in texts for _ in range(math.prod(shape[1:]))]
    scores = score_all(rewards, pictures, prompts)
    for name, values in zip(rewards, scores):
        if not values.isfinite().all():
            place = int((~values.isfinite()).nonzero()[0])
            raise NonFiniteError(f"{where}: reward {name} is {values[place].item()} for the prompt {prompts[place]!r}")
    return scores.view(-1, *shape)


def advantages_of(scores: torch.Tensor, weights: list[float], clip: float) -> torch.Tensor:
    """Rewards [R, P, B, J, G] -> advantages [P, B, G]: each prompt's branch is a group of its own."""
    _, prompts, branches, _, group = scores.shape
    return group_advantages(scores.transpose(2, 3).transpose(1, 2).flatten(2, 3), weights, clip).view(prompts, branches, group)


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
            prompt = torch.arange(prompts, device=one.latents.device).repeat_interleave(1 if shared else group)
            rows.append(
                Rows(
                    latents=one.latents.flatten(0, 1),
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


def log_probs(velocity: Velocity, rows: Rows, sigmas: torch.Tensor, sde: str, eta: float) -> torch.Tensor:
    """[N, M] log-probability of the transitions under the current policy; one forward for each of the N states."""
    v = velocity(rows.latents, sigmas.to(rows.latents.device)[rows.step], rows.prompt)
    members = rows.next_latents.shape[1]
    x, v, step = (tensor.repeat_interleave(members, 0) for tensor in (rows.latents, v, rows.step))
    transition = SDES[sde](x, v, sigmas, step, eta)
    return transition.log_prob(rows.next_latents.flatten(0, 1)).view(-1, members)


def _update(
    velocity: Velocity,
    policy: Policy,
    method: Method,
    sigmas: torch.Tensor,
    optimizer: torch.optim.Optimizer,
    taken: list[Taken],
    advantages: torch.Tensor,
    max_batch: int,
    training: TrainingSettings,
) -> dict:
    """One optimizer step on the mean loss over all given transitions, whatever the number of forward passes (Eq. 12)."""
    batches = rows_of(taken, advantages)
    total = sum(batch.advantages.numel() for batch in batches)
    loss_sum, drift, clipped = 0.0, 0.0, 0
    optimizer.zero_grad()
    for batch in batches:
        for part in torch.arange(len(batch.latents)).split(max_batch):
            rows = Rows(*(getattr(batch, field)[part] for field in Rows.__dataclass_fields__))
            r = ratio(log_probs(velocity, rows, sigmas, method.sde, method.eta), rows.old_log_prob)
            loss = clipped_loss(r, rows.advantages, training.clip_range).sum() / total
            loss.backward()
            loss_sum += loss.item()
            drift = max(drift, (r.detach() - 1).abs().max().item())
            clipped += ((r.detach() - 1).abs() > training.clip_range).sum().item()
    norm = torch.nn.utils.clip_grad_norm_(policy.transformer.parameters(), training.max_grad_norm).item()
    if not (math.isfinite(loss_sum) and math.isfinite(norm)):
        raise NonFiniteError(f"loss {loss_sum}, gradient norm {norm} at noisy steps {[one.decision.step for one in taken]}")
    optimizer.step()
    return {
        "loss": loss_sum,
        "grad_norm": norm,
        "ratio_drift": drift,
        "clip_share": clipped / total,
        "states": sum(len(batch.latents) for batch in batches),
    }
