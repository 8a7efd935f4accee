import pytest

from g2rpo_core.algorithm.methods import METHODS
from g2rpo_core.sampling.schedule import tail
from g2rpo_core.sampling.tree import build


@pytest.mark.parametrize(
    "granularities, num_forward_evals", [((1, 2, 3), 1700), ((1, 2), 1496), ((1,), 1112)]
)
def test_cost_at_the_papers_setting(granularities, num_forward_evals):
    tree = build([(k,) for k in range(8)], granularities, 16)
    assert tree.num_forward_evals(group_size=12) == num_forward_evals


def test_published_methods_cost():
    cost = {
        name: m.tree.build(16).num_forward_evals(16 if name == "branch_grpo" else 12)
        for name, m in METHODS.items()
    }
    assert cost == {
        "g2rpo": 1700,
        "g2rpo_no_mgai": 1112,
        "dance_grpo": 1 + 15 * 12,
        "mix_grpo": 1 + 15 * 12,
        "mix_grpo_flash": 1 + (3 + 4) * 12,  # the 12 steps after the window become 4
        "flow_grpo": 1 + 15 * 12,
        "flow_grpo_fast": 8 + 12 * 8,  # the window of iteration 0 is drawn as (7, 8)
        "grpo_guard": 1 + 15 * 12,
        "g2rpo_coarse": 43,  # the step of iteration 0 is drawn as 6; 49 on average
        "branch_grpo": 1
        + 3 * (2 + 4 + 8)
        + 6 * 16,  # of 16 members, which split after steps 0, 3, 6 and 9
        # merged steps leave shorter tails, and those of granularity 2 share their first two steps
        # with the others
        "e_grpo": 8
        + 12 * (15 + 14 + 13 + 12 + 11 + 9 + 8 + 7)
        + 12 * (6 + 5 + 5 + 4 + 4 + 3 + 2 + 2),
        "tempflow_grpo": 4 * 15 + 12 * sum(range(1, 16)),
        "flow_dppo": 12 * 16,  # a noise each: nothing is shared
        "stepwise_flow_grpo": 1 + 15 * 12,
        **dict.fromkeys(
            ["diffusion_nft", "awm", "advantage_flow", "rvm", "ram", "nft_shared"], 12 * 16
        ),
        "nft_leaves": 43,
    }


@pytest.mark.parametrize("grid", ["released", "paper", "even"])
@pytest.mark.parametrize(
    "branches", [[(k,) for k in range(6)], [(0, 1, 2, 3)], [(2, 4)], [tuple(range(9))]]
)
def test_nothing_is_evaluated_twice_and_nothing_is_missing(branches, grid):
    """Nodes are the different histories of all branches and tails."""
    steps, granularities = 10, (1, 2, 3)
    histories = set()
    for sde_steps in branches:
        prefix = []
        for step in range(sde_steps[-1] + 1):
            prefix.append(
                (step, None if step == 0 or step - 1 not in sde_steps else (sde_steps, step - 1))
            )
            histories.add(tuple(prefix))
        for granularity in granularities:
            path = list(prefix)
            for index, step in enumerate(tail(steps, sde_steps[-1], granularity, grid)):
                path.append((step, (sde_steps, sde_steps[-1]) if index == 0 else None))
                histories.add(tuple(path))
    tree = build(branches, granularities, steps, grid)
    assert len(tree.nodes) == len(histories)
    assert len(tree.sde_steps) == sum(map(len, branches))
    for index, node in enumerate(tree.nodes):
        assert node.parent is None or (
            node.parent < index and tree.nodes[node.parent].step < node.step
        )


def test_coinciding_tails_share_their_leaf():
    tree = build([(7,)], (4, 5, 9), 10)  # released: all three evaluate step 8 alone
    assert len(set(tree.leaves[0])) == 1


@pytest.mark.parametrize(
    ("branches", "more", "match"),
    [
        ([(9,)], {}, "noisy_step"),
        ([(6,)], {"spans": {6: 4}}, "noisy_step"),
        ([(2, 4)], {"spans": {2: 3}}, "SDE step 2 spans 3 steps, over another"),
        ([(0, 1), (1,)], {"splits": (0, 1)}, "branches split 1 and 2 times"),
    ],
)
def test_what_overlaps_splits_unequally_or_is_at_the_end_is_refused(branches, more, match):
    with pytest.raises(ValueError, match=match):
        build(branches, (1,), 10, **more)
    assert build([(6,)], (1,), 10, spans={6: 3}).nodes[-1].step == 9


@pytest.mark.parametrize(
    "noises, splits, group, widths",
    [
        (1, (0, 2), 9, [1, 3, 9]),
        (2, (0, 2), 8, [2, 4, 8]),
        (None, None, 5, [5, 5]),
        (2, None, 6, [2, 6]),
    ],
)
def test_a_tree_is_as_wide_as_its_noises_and_splits_make_it(noises, splits, group, widths):
    tree = build([(0, 2)], (1,), 5, splits=splits, initial_noises=noises)
    assert [tree.width(count, group) for count in range(len(widths))] == widths
    assert tree.width(tree.splits, group) == group


@pytest.mark.parametrize("noises, splits, group", [(1, (0, 2), 8), (5, None, 12), (2, (0, 2), 9)])
def test_a_group_that_cannot_come_of_the_tree_is_refused(noises, splits, group):
    with pytest.raises(ValueError, match=f"a group of {group} cannot come"):
        build([(0, 2)], (1,), 5, splits=splits, initial_noises=noises).num_forward_evals(group)
