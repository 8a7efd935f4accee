"""Rows of the calls that sample and train an SDE step."""

import pytest

from g2rpo_core.config import load_profile
from g2rpo_core.estimate.calls import calls_of, describe_calls
from g2rpo_core.estimate.machines import Machines
from tests.conftest import ROOT


@pytest.mark.parametrize(
    "profile, gpus, method, rollout, update, tolerated",
    [
        ("flux_hps_clip", 16, "g2rpo", {1}, {8}, 3.35e-2),
        (
            "flux_hps_clip",
            16,
            "dance_grpo",
            {1, 12},
            {1, 8, 12},
            4.7e-3,
        ),  # 8 steps of 4 members are 12 + 12 + 8
        ("flux_hps_clip", 16, "g2rpo_coarse", {1}, {1}, 3.35e-2),
        ("sd35_medium_hps_clip", 8, "g2rpo", {2}, {10}, 4.0e-3),
    ],
)
def test_the_rows_of_published_methods(profile, gpus, method, rollout, update, tolerated):
    calls = calls_of(
        load_profile(ROOT / "profiles" / f"{profile}.yaml"),
        method,
        Machines(gpus, 139.0, -(-gpus // 8)),
    )
    assert set().union(*(one.rollout for one in calls)) == rollout
    assert set().union(*(one.update for one in calls)) == update
    assert min(one.tolerated for one in calls) == pytest.approx(tolerated, rel=0.02)


def test_the_line_of_the_plan_says_equal_sizes_or_the_error_that_matters():
    profile = load_profile(ROOT / "profiles" / "flux_hps_clip.yaml")
    said = lambda method: describe_calls(calls_of(profile, method, Machines(16, 139.0, 2)))
    assert said("g2rpo_coarse").endswith(
        "rollout 1, update 1; equal at each step, so ratios start at 1"
    )
    assert said("dance_grpo").endswith(
        "rollout 1 or 12, update 1 or 8 or 12; "
        "|ratio - 1| leaves the clip range at a relative velocity error of 0.47%"
    )
    assert calls_of(profile, "awm", Machines(16, 139.0, 2)) == []
