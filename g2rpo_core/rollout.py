"""Runs a tree of evaluations: every step's live nodes in full batches, nothing evaluated twice."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from .dynamics import Stochastic, ode
from .tree import Decision, Tree

Velocity = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""velocity(latents [N, ...], sigma [N], prompt [N] int64) -> [N, ...]: the model at one noise level and prompt a sample."""


@dataclass(frozen=True)
class Taken:
    """A decision as it was taken, for P prompts and groups of G; all float32.

    latents: [P, 1 or G, ...], 1 where the whole group departs from one state; next_latents: [P, G, ...];
    log_prob: [P, G] of the transition under the policy that sampled it.
    """

    decision: Decision
    latents: torch.Tensor
    next_latents: torch.Tensor
    log_prob: torch.Tensor


@dataclass(frozen=True)
class Rollout:
    """clean: final latents [P, B, J, G, ...] for B branches and J granularities; taken: one for each tree decision."""

    clean: torch.Tensor
    taken: list[Taken]
    evaluations: int


@torch.no_grad()
def rollout(
    velocity: Velocity,
    tree: Tree,
    sigmas: torch.Tensor,
    transition: Stochastic,
    initial: torch.Tensor,
    noises: Sequence[torch.Tensor],
    max_batch: int,
) -> Rollout:
    """Samples the group of every branch for P prompts.

    sigmas: [T+1]; transition: of `Method.transition`; initial: x_T [P, ...], standard normal; noises: for every decision of the
    tree [P, G, ...], standard normal; max_batch: latents in one call of the model, at least 1.

    All nodes of one step index go through the model together, so the sequential depth is T whatever the tree.
    """
    prompts, group_size = noises[0].shape[:2]
    shape = initial.shape[1:]
    children = defaultdict(list)
    for index, node in enumerate(tree.nodes):
        children[node.parent].append(index)
    leaf_nodes = {leaf for ends in tree.leaves for leaf in ends}
    states = {root: initial.float()[:, None] for root in children[None]}  # node -> [P, 1 or G, ...]
    clean: dict[int, torch.Tensor] = {}
    taken: dict[int, Taken] = {}
    evaluations = 0

    for step in range(len(sigmas) - 1):
        live = [index for index, node in enumerate(tree.nodes) if node.step == step]
        if not live:
            continue
        batch = torch.cat([states[index].flatten(0, 1) for index in live])
        prompt = torch.cat([prompt_of_rows(states[index]) for index in live])
        velocities = evaluate(velocity, batch, sigmas[step], prompt, max_batch)
        evaluations += len(batch)
        for index, v in zip(live, velocities.split([states[index].shape[:2].numel() for index in live])):
            x = states.pop(index)
            v = v.view(x.shape)
            if index in leaf_nodes:
                clean[index] = ode(x, v, sigmas[step], sigmas[-1])
            for child in children[index]:
                node = tree.nodes[child]
                if node.noise is None:
                    states[child] = ode(x, v, sigmas[step], sigmas[node.step])
                    continue
                noise = noises[node.noise]
                wide = (prompts, group_size, *shape)
                noisy = transition(x.expand(wide).flatten(0, 1), v.expand(wide).flatten(0, 1), step=step)
                sampled = noisy.sample(noise.flatten(0, 1))
                states[child] = sampled.view(wide)
                log_prob = noisy.log_prob(sampled).view(prompts, group_size)
                taken[node.noise] = Taken(tree.decisions[node.noise], x, states[child], log_prob)

    finished = torch.stack([torch.stack([clean[leaf] for leaf in ends], 1) for ends in tree.leaves], 1)
    return Rollout(finished, [taken[index] for index in range(len(tree.decisions))], evaluations)


@torch.no_grad()
def sample(velocity: Velocity, initial: torch.Tensor, sigmas: torch.Tensor, max_batch: int) -> torch.Tensor:
    """Deterministic sampling of one picture a prompt (Eq. 1): x_T [P, ...] -> clean latents [P, ...], float32."""
    latents, prompt = initial.float(), torch.arange(len(initial), device=initial.device)
    for step in range(len(sigmas) - 1):
        latents = ode(latents, evaluate(velocity, latents, sigmas[step], prompt, max_batch), sigmas[step], sigmas[step + 1])
    return latents


def evaluate(
    velocity: Velocity, latents: torch.Tensor, sigma: torch.Tensor, prompt: torch.Tensor, max_batch: int
) -> torch.Tensor:
    """The velocity of latents [N, ...] at one sigma, in calls of equal size that is at most `max_batch`."""
    sigma = sigma.to(latents.device).expand(len(latents))
    calls = -(-len(latents) // max_batch)
    parts = zip(latents.tensor_split(calls), sigma.tensor_split(calls), prompt.tensor_split(calls))
    return torch.cat([velocity(*part) for part in parts])


def prompt_of_rows(state: torch.Tensor) -> torch.Tensor:
    """[P, g, ...] -> the prompt index of each of its P * g rows, int64."""
    prompts, members = state.shape[:2]
    return torch.arange(prompts, device=state.device).repeat_interleave(members)
