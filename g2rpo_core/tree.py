"""The tree of model evaluations that a rollout needs, with nothing in it twice.

A node is one evaluation of the velocity. Its identity is its history (parent, step, noise on the way), so prefixes
and tails that coincide are one node by construction: all branches share the deterministic prefix (the anchor), the
members of a group share the evaluation from which their noise departs, and granularities share a tail's start.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from .schedule import Grid, tail


@dataclass(frozen=True)
class Node:
    """One evaluation of the velocity, at sigma[step]; for the whole group if noise lies on the way, else once."""

    step: float  # a tail of the grid `even` may lie between two steps
    parent: int | None  # index of the node it comes from; None at the root
    noise: int | None  # index of the decision whose noise leads here; None after a deterministic step
    grouped: bool
    tail: bool  # after the branch's last noise: the tails' solver, not Euler's, makes the step from here


@dataclass(frozen=True)
class Decision:
    """A stochastic transition at sigma[step] of a branch: what the policy is trained on."""

    branch: int
    step: int


@dataclass(frozen=True)
class Tree:
    """nodes in an order in which parents come first; decisions by branch and step; leaves[branch][granularity] = node."""

    nodes: tuple[Node, ...]
    decisions: tuple[Decision, ...]
    leaves: tuple[tuple[int, ...], ...]

    def evaluations(self, group_size: int) -> int:
        """Model evaluations for one prompt: design-level cost of a rollout, 1700 at the paper's setting."""
        return sum(group_size if node.grouped else 1 for node in self.nodes)


def build(branches: Iterable[Sequence[int]], granularities: Sequence[int], steps: int, grid: Grid = "released") -> Tree:
    """The smallest tree for branches that are noisy at the given rising step indices, each finished at all granularities.

    steps: T; raises ValueError (from `tail`) for a noisy step beyond T-2 or a granularity under 1.
    """
    nodes: dict[tuple[int | None, float, int | None, bool], int] = {}
    table: list[Node] = []
    decisions: list[Decision] = []
    leaves = []

    def add(parent: int | None, step: float, noise: int | None, tail: bool) -> int:
        key = (parent, step, noise, tail)
        if key not in nodes:
            nodes[key] = len(table)
            grouped = noise is not None or (parent is not None and table[parent].grouped)
            table.append(Node(step, parent, noise, grouped, tail))
        return nodes[key]

    for branch, noisy in enumerate(branches):
        tails = [tail(steps, noisy[-1], granularity, grid) for granularity in granularities]
        node = add(None, 0, None, False)
        for step in range(noisy[-1] + 1):
            target = add(node, step + 1, len(decisions) if step in noisy else None, step == noisy[-1])
            if step in noisy:
                decisions.append(Decision(branch, step))
            node = target
        ends = []
        for _, *rest in tails:  # the first is `node` itself
            end = node
            for step in rest:
                end = add(end, step, None, True)
            ends.append(end)
        leaves.append(tuple(ends))
    return Tree(tuple(table), tuple(decisions), tuple(leaves))
