"""Builds the tree of model calls that a rollout needs, without duplicates.

A node is one call of the velocity model. Its identity is its history (parent, step, noise on the
way), so prefixes and tails that coincide are one node by construction: all branches share the
deterministic prefix (the anchor), the members of a group share the call from which their noise
departs, and granularities share a tail's start.

A node stands for one state or for several: its *width*. A rollout begins with its initial noises,
one for the whole group in most methods; wherever the states split, each becomes as many, until
there is one for each member of the group.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from g2rpo_core.sampling.schedule import Grid, tail

ONE_STEP: Mapping[int, int] = MappingProxyType({})  # every SDE step spans one step of the grid


@dataclass(frozen=True)
class Node:
    """One call of the velocity model at sigma[step]."""

    step: float
    """Index of the step; on a tail of the grid `even` it may lie between two steps."""
    parent: int | None
    """Index of the node that it comes from; None at the root."""
    noise: int | None
    """Index of the SDE step whose noise leads here; None after a deterministic step."""
    splits: int
    """How often the states have split on the way here."""
    tail: bool
    """Whether it comes after the branch's last noise: then the tails' solver, not Euler's, makes the step from here."""


@dataclass(frozen=True)
class SDEStep:
    """A stochastic transition, from sigma[step] to sigma[step + span]: what the policy is trained on."""

    branch: int
    """Index of the branch that it is on."""
    step: int
    """Index of the step where it starts."""
    span: int
    """How many steps of the grid it takes at once."""


@dataclass(frozen=True)
class Tree:
    """All model calls of a rollout, and what they lead to."""

    nodes: tuple[Node, ...]
    """The calls, parents first."""
    sde_steps: tuple[SDEStep, ...]
    """The stochastic transitions, by branch and step."""
    leaves: tuple[tuple[int, ...], ...]
    """leaves[branch][granularity]: the node from which a tail jumps to the clean latents."""
    granularities: tuple[int, ...]
    """Step sizes of the tails."""
    initial_noises: int | None
    """Of a group; None: one for each member."""
    splits: int
    """How often the states of every branch split."""

    def width(self, splits: int, group_size: int) -> int:
        """Return the states of a prompt after so many splits; ValueError if a group of this size cannot come of the tree."""
        first = self.initial_noises or group_size
        per_noise, rest = divmod(group_size, first)
        children = children_of_split(per_noise, self.splits)
        if rest or children is None:
            noises = f"{first} initial noises" if first > 1 else "one initial noise"
            raise ValueError(
                f"a group of {group_size} cannot come of {noises} by {self.splits} splits into "
                "equally many"
            )
        return first * children**splits

    def widths(self, group_size: int) -> list[int]:
        """Return the states of a prompt at every node."""
        return [self.width(node.splits, group_size) for node in self.nodes]

    def transitions(self) -> list[tuple[int, int]]:
        """Return the node before and the node after each SDE step."""
        ends = {
            node.noise: (node.parent or 0, index)
            for index, node in enumerate(self.nodes)
            if node.noise is not None
        }
        return [ends[index] for index in range(len(self.sde_steps))]

    def num_forward_evals(self, group_size: int) -> int:
        """Count the forward evaluations (NFE) of a rollout for one prompt: 1700 at the paper's setting."""
        return sum(self.widths(group_size))


def children_of_split(states: int, splits: int) -> int | None:
    """Return into how many each state splits, if equal splits turn one state into `states`; None if that is no whole number."""
    children = round(states ** (1 / splits)) if splits else 1
    return children if children**splits == states else None


def build(
    branches: Iterable[Sequence[int]],
    granularities: Sequence[int],
    steps: int,
    grid: Grid = "released",
    spans: Mapping[int, int] = ONE_STEP,
    splits: Collection[int] | None = None,
    initial_noises: int | None = 1,
) -> Tree:
    """Build the smallest tree for branches with SDE steps at the given rising step indices, each finished at all granularities.

    A branch without SDE steps is one tail from the initial noise to the clean latents, step by
    step. steps: T; spans: how many steps of the grid an SDE step takes at once, 1 if it is not in
    there; splits: the SDE steps at which states split, None for the first of every branch.
    ValueError (from `tail`) for an SDE step that does not end by T-1, for a granularity under 1,
    for SDE steps that overlap, and for branches that do not split equally often.
    """
    nodes: dict[tuple[int | None, float, int | None, bool], int] = {}
    table: list[Node] = []
    sde_steps: list[SDEStep] = []
    leaves = []
    split_counts: set[int] = set()

    def add(parent: int | None, step: float, noise: int | None, splits: int, tail: bool) -> int:
        key = (parent, step, noise, tail)
        if key not in nodes:
            nodes[key] = len(table)
            table.append(Node(step, parent, noise, splits, tail))
        return nodes[key]

    for branch, stochastic in enumerate(branches):
        splitting = (
            stochastic[:1] if splits is None else [step for step in stochastic if step in splits]
        )
        split_counts.add(len(splitting))
        # From the initial noise to the end of the branch's last SDE step
        last = stochastic[-1] + spans.get(stochastic[-1], 1) if stochastic else 0
        tails = [
            tail(steps, last - 1, granularity, grid) if stochastic else range(steps)
            for granularity in granularities
        ]
        node, step, split = add(None, 0, None, 0, False), 0, 0
        while step < last:
            noisy = step in stochastic
            span = spans.get(step, 1) if noisy else 1
            if any(step < other < step + span for other in stochastic):
                raise ValueError(f"SDE step {step} spans {span} steps, over another SDE step")
            split += step in splitting
            target = add(
                node, step + span, len(sde_steps) if noisy else None, split, step + span == last
            )
            if noisy:
                sde_steps.append(SDEStep(branch, step, span))
            node, step = target, step + span
        # A tail for each granularity; all of them begin at `node`
        ends = []
        for _, *rest in tails:
            end = node
            for later in rest:
                end = add(end, later, None, split, True)
            ends.append(end)
        leaves.append(tuple(ends))
    if len(split_counts) > 1:
        raise ValueError(
            f"branches split {' and '.join(map(str, sorted(split_counts)))} times: "
            "all must split equally often"
        )
    return Tree(
        tuple(table),
        tuple(sde_steps),
        tuple(leaves),
        tuple(granularities),
        initial_noises,
        split_counts.pop(),
    )
