import json
import math
import random

import pytest
import torch
from ruamel.yaml import YAML

from g2rpo_core.algorithm.credit import CreditAssignment
from g2rpo_core.algorithm.methods import CLIP_RANGES, METHODS, Method, Window, build_objective
from g2rpo_core.sampling.schedule import shifted_sigmas
from tests.conftest import ROOT

STEPS = tuple(range(24))  # the SDE steps of T = 25


def test_mix_grpo_slides_its_window_by_one_every_25_iterations_and_starts_again():
    starts = [
        METHODS["mix_grpo"].tree.branches(25, iteration)[0] for iteration in range(0, 550, 25)
    ]
    assert starts == [tuple(range(k, k + 4)) for k in [*range(21), 0]]
    assert METHODS["mix_grpo"].tree.branches(25, 24) == METHODS["mix_grpo"].tree.branches(25, 0)


@pytest.mark.parametrize("order", ["random", "scattered"])
def test_drawn_windows_depend_on_seed_and_iteration_alone_and_reach_every_step(order):
    window = Window(size=3, order=order, every=2)
    draws = [window.choose(STEPS, iteration, seed=1) for iteration in range(400)]
    assert draws == [window.choose(STEPS, iteration, seed=1) for iteration in range(400)]
    assert draws[::2] == draws[1::2]
    assert draws != [window.choose(STEPS, iteration, seed=2) for iteration in range(400)]
    assert {step for draw in draws for step in draw} == set(STEPS)
    assert all(len(set(draw)) == 3 and draw == tuple(sorted(draw)) for draw in draws)
    if order == "random":
        assert all(draw[2] - draw[0] == 2 for draw in draws)


@pytest.mark.parametrize(
    "wrong, complaint",
    [
        ({"sde_steps": [3, 1]}, "must be different numbers in rising order"),
        ({"sde_steps": [1, 1]}, "must be different numbers in rising order"),
        ({"sde_steps": []}, "must be different numbers in rising order"),
        ({"granularities": [2, 1]}, "must be different numbers in rising order"),
        ({"sde_steps": [-1, 2]}, "must be 0 or more"),
        ({"granularities": [0, 1]}, "must each be at least 1"),
    ],
)
def test_steps_and_granularities_are_numbers_in_rising_order(wrong, complaint):
    with pytest.raises(ValueError, match=complaint):
        METHODS["g2rpo"].changed(tree=wrong)


@pytest.mark.parametrize("order", ["progressive", "random", "frozen", "scattered"])
def test_a_window_wider_than_the_steps_is_all_of_them(order):
    assert Window(size=9, order=order).choose((1, 2, 5), 7, 0) == (1, 2, 5)


def test_a_frozen_window_stays_at_the_first_steps():
    window = Window(size=4, order="frozen")
    assert {window.choose(STEPS, iteration, 1) for iteration in range(50)} == {(0, 1, 2, 3)}


def test_a_share_of_the_sde_steps_is_drawn():
    method = METHODS["dance_grpo"]
    draws = [method.objective.draw_steps(15, random.Random(seed)) for seed in range(50)]
    assert all(len(draw) == len(set(draw)) == 9 for draw in draws)
    assert {index for draw in draws for index in draw} == set(range(15))
    # DanceGRPO's int(T f): 8.4 and 6.6 are rounded down
    assert [method.objective.num_trained(steps) for steps in (1, 9, 11, 14, 15, 24)] == [
        1,
        5,
        6,
        8,
        9,
        14,
    ]


def test_the_published_entries_are_the_methods_own_settings():
    """A method is its entry in examples/published_methods.yaml, which has the flags of its code."""
    read = YAML(typ="safe", pure=True).load(ROOT / "examples" / "published_methods.yaml")
    entries = {name: entry for name, entry in read.items() if name in METHODS}
    assert set(entries) == set(METHODS)
    for name, entry in entries.items():
        assert Method.model_validate_json(json.dumps(entry["settings"])) == METHODS[name], name
        assert entry.get("training", {}).get("clip_range") == CLIP_RANGES.get(name), name
    coarse = METHODS["g2rpo_coarse"].tree
    assert (coarse.sde_steps, coarse.window, coarse.granularities) == (
        (3, 4, 5, 6, 7),
        Window(size=1, order="scattered"),
        (3,),
    )


def test_the_last_tails_begin_where_the_last_sde_step_ends():
    assert [METHODS[name].tree.last_step(16) for name in ("g2rpo", "dance_grpo", "e_grpo")] == [
        8,
        15,
        9,
    ]
    assert (
        METHODS["e_grpo"].changed(tree={"spans": (1, 1, 1, 1, 1, 1, 5, 2)}).tree.last_step(16) == 11
    )


def test_e_grpo_merges_steps_until_their_entropy_is_over_its_threshold():
    """Eq. 9-11 of arXiv 2601.00423: e^h = 2 pi e variance > 2.2; Alg. 1: from steps 0-7 of 16."""
    tree = METHODS["e_grpo"].tree
    transition, one = tree.transition(shifted_sigmas(16, 3.0)), torch.zeros(1, 1)
    for step in range(8):
        entropies = [
            2 * math.pi * math.e * transition(one, one, step=step, span=span).std.item() ** 2
            for span in (1, 2, 3)
        ]
        assert tree.spans_at(16)[step] == 1 + sum(each < 2.2 for each in entropies)
    assert tree.branches(16) == tuple((step,) for step in range(8))


def test_tempflow_grpos_weights_are_its_codes_constant_times_the_noise():
    """scripts/train_flux_pr.py: 1.73 x deviation; T = 10, shift 3.158 at 1024 x 1024, eta 0.9."""
    method, sigmas = METHODS["tempflow_grpo"], shifted_sigmas(10, math.exp(1.15))
    objective = build_objective(
        method, CreditAssignment(method.credit, method.groups, [1.0], 5.0), sigmas, 1e-4
    )
    assert len(objective.step_weights) == 9
    for step, weight in objective.step_weights.items():
        assert weight == pytest.approx(1.73 * objective.std(step, 1), rel=0.003)


def test_flow_grpo_fast_starts_its_window_in_the_first_half_up_to_its_end():
    """`random.randint(0, num_steps // 2)` of its first form, and noise at two steps from there."""
    for steps, tree in (
        (16, METHODS["flow_grpo_fast"].tree),
        (10, METHODS["flow_grpo_fast"].changed(tree={"sde_steps": range(7)}).tree),
    ):
        windows = {tree.branches(steps, iteration)[0] for iteration in range(300)}
        assert windows == {(start, start + 1) for start in range(steps // 2 + 1)}


def test_what_the_methods_of_flow_grpo_train_is_what_their_code_does():
    """flow_grpo: config/grpo.py, grpo_guard.py; TempFlow-GRPO: dgx.py."""
    published = {
        name: (
            METHODS[name].objective.kl_coef,
            METHODS[name].objective.updates_per_rollout,
            CLIP_RANGES.get(name),
            METHODS[name].tree.eta,
        )
        for name in ("flow_grpo", "flow_grpo_fast", "grpo_guard", "tempflow_grpo")
    }
    assert published == {
        "flow_grpo": (0.001, 2, None, 0.7),
        "flow_grpo_fast": (0.0, 2, 1e-5, 0.8),
        "grpo_guard": (0.0, 2, 4e-6, 0.7),
        "tempflow_grpo": (0.004, 2, None, 0.9),
    }
