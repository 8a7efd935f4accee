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
    """After the branch's last noise: the tails' solver, not Euler's, makes the step from here."""


@dataclass(frozen=True)
class SDEStep:
    """A stochastic transition from sigma[step] to sigma[step + span]; the policy trains on it."""

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
        """Count a prompt's states after `splits` splits; ValueError if a size cannot split."""
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
        """Count the forward evaluations (NFE) per prompt of a rollout: 1700 in the paper."""
        return sum(self.widths(group_size))


def children_of_split(states: int, splits: int) -> int | None:
    """Return the children per split that turn one state into `states`; None if not whole."""
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
    """Build the smallest tree for branches of SDE steps (rising), each ended at all granularities.

    A branch without SDE steps is one tail from the initial noise to the clean latents, step by
    step. steps: T; spans: steps of the grid that an SDE step takes at once, by default 1; splits:
    SDE steps at which states split, None for the first of every branch. ValueError for an SDE step
    that does not end by T-1, a granularity under 1, overlapping SDE steps and unequal splits.
    """
    table: dict[Node, int] = {}  # a node's history is its identity: equal ones are one call
    sde_steps: list[SDEStep] = []
    leaves = []
    split_counts: set[int] = set()

    def add(step: float, parent: int | None, noise: int | None, splits: int, tail: bool) -> int:
        return table.setdefault(Node(step, parent, noise, splits, tail), len(table))

    for branch, stochastic in enumerate(branches):
        at = stochastic[:1] if splits is None else [step for step in stochastic if step in splits]
        split_counts.add(len(at))
        # From the initial noise to the end of the branch's last SDE step
        last = stochastic[-1] + spans.get(stochastic[-1], 1) if stochastic else 0
        tails = [
            tail(steps, last - 1, granularity, grid) if stochastic else range(steps)
            for granularity in granularities
        ]
        node, step, split = add(0, None, None, 0, False), 0, 0
        while step < last:
            noisy = step in stochastic
            span = spans.get(step, 1) if noisy else 1
            if any(step < other < step + span for other in stochastic):
                raise ValueError(f"SDE step {step} spans {span} steps, over another SDE step")
            split += step in at
            noise = len(sde_steps) if noisy else None
            if noisy:
                sde_steps.append(SDEStep(branch, step, span))
            step += span
            node = add(step, node, noise, split, step == last)
        # A tail for each granularity; all of them begin at `node`
        ends = []
        for _, *rest in tails:
            end = node
            for later in rest:
                end = add(later, end, None, split, True)
            ends.append(end)
        leaves.append(tuple(ends))
    if len(split_counts) > 1:
        counts = " and ".join(map(str, sorted(split_counts)))
        raise ValueError(f"branches split {counts} times: all must split equally often")
    count = split_counts.pop()
    return Tree(
        tuple(table), tuple(sde_steps), tuple(leaves), tuple(granularities), initial_noises, count
    )
