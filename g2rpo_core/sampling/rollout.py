"""Runs a tree of model calls: ready nodes share full batches, and nothing is computed twice.

Axes of tensors: P prompts, B branches, J granularities, G members of a group, then the latents' own
(`...`).
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from g2rpo_core.sampling.ode import dpm2, ode
from g2rpo_core.sampling.transitions import Stochastic
from g2rpo_core.sampling.tree import SDEStep, Tree

Velocity = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""velocity(latents [N, ...], sigma [N], prompt [N] int64) -> [N, ...]: one call of the model."""

SigmaOf = Callable[[float], float]
"""sigma_of(step) -> sigma at a step index in 0...T, also between two; see `schedule.sigma_at`."""


@dataclass(frozen=True)
class SampledTransition:
    """An SDE step as it was sampled for P prompts: V states, W next states; all tensors float32.

    W is a multiple of V, and the next states of one state are neighbours. W is smaller than G, the
    members of the group, until all states of the tree have split.
    """

    sde_step: SDEStep
    """Which step it is."""
    latents: torch.Tensor
    """[P, V, ...]: the states before it."""
    mean: torch.Tensor
    """[P, V, ...]: the mean of the transition from each state."""
    next_latents: torch.Tensor
    """[P, W, ...]: the states after it."""
    log_prob: torch.Tensor
    """[P, W]: of the transition under the policy that sampled it."""

    @property
    def members_of_state(self) -> int:
        """Count the next states that were sampled from one state, W / V."""
        return self.log_prob.shape[1] // self.latents.shape[1]

    def members(self, members: slice | torch.Tensor) -> "SampledTransition":
        """Return the same SDE step for a part of the next states: a slice, or indices.

        A slice that splits no state's next states keeps the states; in any other part, each next
        state has its own copy of its state.
        """
        each = lambda tensor: tensor.repeat_interleave(self.members_of_state, 1)[:, members]
        if isinstance(members, slice) and (states := whole_states(members, self.members_of_state)):
            each = lambda tensor: tensor[:, states]
        part = lambda tensor: tensor if tensor.shape[1] == 1 else each(tensor)
        return SampledTransition(
            self.sde_step,
            part(self.latents),
            part(self.mean),
            self.next_latents[:, members],
            self.log_prob[:, members],
        )


def whole_states(members: slice, members_of_state: int) -> slice | None:
    """Return the states with exactly these next states; None if a state has others, too."""
    if members.start % members_of_state or members.stop % members_of_state:
        return None
    return slice(members.start // members_of_state, members.stop // members_of_state)


@dataclass(frozen=True)
class Rollout:
    """The result of a rollout for P prompts."""

    clean: torch.Tensor
    """[P, B, J, G, ...]: final latents."""
    transitions: list[SampledTransition]
    """One for each SDE step of the tree."""
    num_forward_evals: int
    """Latents that went through the model."""
    granularities: tuple[int, ...]
    """The J step sizes of the tails."""
    around: list[tuple[torch.Tensor, torch.Tensor]] | None = None
    """Clean latents predicted before and after each transition, [P, V, ...] and [P, W, ...]."""


@torch.no_grad()
def rollout(
    velocity: Velocity,
    tree: Tree,
    sigma_of: SigmaOf,
    transition: Stochastic,
    initial: torch.Tensor,
    noises: Sequence[torch.Tensor],
    max_batch: int,
    solver: str = "euler",
    predictions: bool = False,
) -> Rollout:
    """Sample the group of every branch for P prompts.

    sigma_of: sigma of a step index; transition: the tree's SDE step; initial: x_T [P, I, ...] of I
    initial noises, standard normal; noises: for every SDE step of the tree [P, W, ...] of W next
    states, standard normal (the last W is G); max_batch: latents in one call of the model, at least
    1; solver: of the tails, `euler` or `dpm2`; predictions: keep `Rollout.around`.

    Nodes of any step share a call once their latents are known; those with the most steps left go
    first. Nothing waits for the device.
    """
    children, ends = children_of(tree), tree.transitions()
    kept = {leaf for leaves in tree.leaves for leaf in leaves}
    kept |= {node for pair in ends for node in pair} if predictions else set()
    states = {root: initial.float() for root in children[None]}  # node -> [P, its width, ...]
    predicted: dict[int, torch.Tensor] = {}  # node -> its clean prediction, while it is needed
    transitions: dict[int, SampledTransition] = {}
    num_forward_evals = 0

    while states:
        # One call of the model for the nodes that are ready
        sizes = {index: x.shape[:2].numel() for index, x in states.items()}
        chosen = _next_call(sizes, tree, max_batch)
        ready = [(states.pop(index), sigma_of(tree.nodes[index].step)) for index in chosen]
        velocities = _velocities_of_nodes(velocity, ready, max_batch)
        for index, (x, sigma), v in zip(chosen, ready, velocities):
            num_forward_evals += sizes[index]
            predicted[index] = ode(x, v, sigma, 0.0)
            # The states of the nodes that follow: by noise, or by the solver
            for child in children[index]:
                noise = tree.nodes[child].noise
                if noise is not None:
                    sampled = _sample(tree.sde_steps[noise], x, v, transition, noises[noise])
                    states[child], transitions[noise] = sampled.next_latents, sampled
                else:
                    before = predicted if solver == "dpm2" else None
                    states[child] = _solver_step(tree, index, child, x, v, sigma_of, before)
            # A first-order step never looks back, and the predictions of all nodes are large
            if solver == "euler" and index not in kept:
                del predicted[index]

    clean = [torch.stack([predicted[leaf] for leaf in leaves], 1) for leaves in tree.leaves]
    return Rollout(
        torch.stack(clean, 1),  # [P, B, J, G, ...]
        [transitions[index] for index in range(len(tree.sde_steps))],
        num_forward_evals,
        tree.granularities,
        [(predicted[before], predicted[after]) for before, after in ends] if predictions else None,
    )


def _solver_step(
    tree: Tree,
    index: int,
    child: int,
    x: torch.Tensor,
    v: torch.Tensor,
    sigma_of: SigmaOf,
    predicted: Mapping[int, torch.Tensor] | None,
) -> torch.Tensor:
    """Step without noise from node `index`, with states x and velocities v, to node `child`.

    predicted: clean predictions by node, for second-order steps on tails; None: Euler's step.
    """
    parent = tree.nodes[index]
    sigma, following = sigma_of(parent.step), sigma_of(tree.nodes[child].step)
    if predicted is None or not parent.tail or parent.parent is None:
        return ode(x, v, sigma, following)
    before = _of_each(predicted[parent.parent], x.shape[1])
    sigmas = (sigma_of(tree.nodes[parent.parent].step), sigma, following)
    return dpm2(x, predicted[index], before, sigmas)


def _of_each(before: torch.Tensor, count: int) -> torch.Tensor:
    """Repeat per-state values [P, V, ...] for `count` child states (count > V after a split)."""
    return before.repeat_interleave(count // before.shape[1], 1)


def _sample(
    step: SDEStep, x: torch.Tensor, v: torch.Tensor, transition: Stochastic, noise: torch.Tensor
) -> SampledTransition:
    """Sample next states [P, W, ...] of states x [P, V, ...], velocities v; noise: [P, W, ...]."""
    one = transition(x.flatten(0, 1), v.flatten(0, 1), step=step.step, span=step.span)
    noisy = one.repeat(noise.shape[1] // x.shape[1])
    sampled = noisy.sample(noise.flatten(0, 1))
    log_prob = noisy.log_prob(sampled).view(noise.shape[:2])
    return SampledTransition(step, x, one.mean.view_as(x), sampled.view(noise.shape), log_prob)


def num_calls(tree: Tree, prompts: int, group_size: int, max_batch: int) -> int:
    """Count the calls of the model that `rollout` makes, without the model."""
    return sum(
        -(-sum(chosen.values()) // max_batch)
        for chosen in shared_calls(tree, prompts, group_size, max_batch)
    )


def shared_calls(
    tree: Tree, prompts: int, group_size: int, max_batch: int
) -> Iterator[dict[int, int]]:
    """Yield the nodes that `rollout` computes together, each with its number of latents.

    They share one call, or several of equal size.
    """
    widths = tree.widths(group_size)
    size = lambda index: prompts * widths[index]
    children = children_of(tree)
    ready = {root: size(root) for root in children[None]}
    while ready:
        chosen = _next_call(ready, tree, max_batch)
        yield {index: ready.pop(index) for index in chosen}
        ready |= {child: size(child) for index in chosen for child in children[index]}


def children_of(tree: Tree) -> defaultdict[int | None, list[int]]:
    """Map each node to the nodes that come from it, and None to the roots."""
    children: defaultdict[int | None, list[int]] = defaultdict(list)
    for index, node in enumerate(tree.nodes):
        children[node.parent].append(index)
    return children


def _next_call(ready: dict[int, int], tree: Tree, max_batch: int) -> list[int]:
    """Choose the nodes of the next call among `ready` (node -> its number of latents).

    Those of the earliest steps that fit, at least one.
    """
    chosen: list[int] = []
    total = 0
    for index in sorted(ready, key=lambda index: tree.nodes[index].step):
        if not chosen or total + ready[index] <= max_batch:
            chosen.append(index)
            total += ready[index]
    return chosen


def _velocities_of_nodes(
    velocity: Velocity, nodes: list[tuple[torch.Tensor, float]], max_batch: int
) -> list[torch.Tensor]:
    """Return the velocities of nodes, each given by its latents [P, width, ...] and its sigma."""
    rows = [latents.flatten(0, 1) for latents, _ in nodes]
    sigma = torch.cat([row.new_full((len(row),), sigma) for row, (_, sigma) in zip(rows, nodes)])
    prompt = torch.cat([prompt_of_rows(latents) for latents, _ in nodes])
    velocities = velocity_in_batches(velocity, torch.cat(rows), sigma, prompt, max_batch).split(
        [len(row) for row in rows]
    )
    return [v.view(latents.shape) for v, (latents, _) in zip(velocities, nodes)]


@torch.no_grad()
def sample(
    velocity: Velocity, initial: torch.Tensor, sigmas: Sequence[float], max_batch: int
) -> torch.Tensor:
    """Sample an image per prompt without noise (Eq. 1): x_T [P, ...] -> clean latents, float32."""
    latents, prompt = initial.float(), torch.arange(len(initial), device=initial.device)
    for sigma, following in zip(sigmas, sigmas[1:]):
        v = velocity_in_batches(
            velocity, latents, latents.new_full((len(latents),), sigma), prompt, max_batch
        )
        latents = ode(latents, v, sigma, following)
    return latents


def velocity_in_batches(
    velocity: Velocity,
    latents: torch.Tensor,
    sigma: torch.Tensor,
    prompt: torch.Tensor,
    max_batch: int,
) -> torch.Tensor:
    """Return velocities of latents [N, ...] at sigmas [N], in equal calls up to `max_batch`."""
    calls = -(-len(latents) // max_batch)
    parts = zip(latents.tensor_split(calls), sigma.tensor_split(calls), prompt.tensor_split(calls))
    return torch.cat([velocity(*part) for part in parts])


def prompt_of_rows(state: torch.Tensor) -> torch.Tensor:
    """Return the prompt index of each of the P * g rows of a state [P, g, ...], int64."""
    prompts, members = state.shape[:2]
    return torch.arange(prompts, device=state.device).repeat_interleave(members)
