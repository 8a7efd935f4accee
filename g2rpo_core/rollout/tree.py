"""The tree of model calls that a rollout needs, without duplicates.

A node is one call of the velocity model. Its identity is its history (parent, step, noise on the way), so prefixes
and tails that coincide are one node by construction: all branches share the deterministic prefix (the anchor), the
members of a group share the call from which their noise departs, and granularities share a tail's start.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from g2rpo_core.sampling.schedule import Grid, tail


@dataclass(frozen=True)
class Node:
    """One call of the velocity model at sigma[step]."""

    step: float  # a tail of the grid `even` may lie between two steps
    parent: int | None  # index of the node it comes from; None at the root
    noise: int | None  # index of the SDE step whose noise leads here; None after a deterministic step
    per_member: bool  # made once per group member after the first SDE step; before it, once for all
    tail: bool  # after the branch's last noise: the next step is by the tails' solver, not Euler's


@dataclass(frozen=True)
class SDEStep:
    """A stochastic transition at sigma[step] of a branch: what the policy is trained on."""

    branch: int
    step: int


@dataclass(frozen=True)
class Tree:
    """nodes: parents come first; sde_steps: by branch and step; leaves[branch][granularity] = node."""

    nodes: tuple[Node, ...]
    sde_steps: tuple[SDEStep, ...]
    leaves: tuple[tuple[int, ...], ...]
    granularities: tuple[int, ...]

    def num_forward_evals(self, group_size: int) -> int:
        """NFE, calls of the model for one prompt: design-level cost of a rollout, 1700 at the paper's setting."""
        return sum(group_size if node.per_member else 1 for node in self.nodes)


def build(branches: Iterable[Sequence[int]], granularities: Sequence[int], steps: int, grid: Grid = "released") -> Tree:
    """The smallest tree for branches with SDE steps at the given rising step indices, each finished at all granularities.

    steps: T; raises ValueError (from `tail`) for an SDE step beyond T-2 or a granularity under 1.
    """
    nodes: dict[tuple[int | None, float, int | None, bool], int] = {}
    table: list[Node] = []
    sde_steps: list[SDEStep] = []
    leaves = []

    def add(parent: int | None, step: float, noise: int | None, tail: bool) -> int:
        key = (parent, step, noise, tail)
        if key not in nodes:
            nodes[key] = len(table)
            per_member = noise is not None or (parent is not None and table[parent].per_member)
            table.append(Node(step, parent, noise, per_member, tail))
        return nodes[key]

    for branch, stochastic in enumerate(branches):
        tails = [tail(steps, stochastic[-1], granularity, grid) for granularity in granularities]
        node = add(None, 0, None, False)
        for step in range(stochastic[-1] + 1):
            target = add(node, step + 1, len(sde_steps) if step in stochastic else None, step == stochastic[-1])
            if step in stochastic:
                sde_steps.append(SDEStep(branch, step))
            node = target
        ends = []
        for _, *rest in tails:  # the first is `node` itself
            end = node
            for later in rest:
                end = add(end, later, None, True)
            ends.append(end)
        leaves.append(tuple(ends))
    return Tree(tuple(table), tuple(sde_steps), tuple(leaves), tuple(granularities))
