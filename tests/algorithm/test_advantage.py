import json

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from g2rpo_core.algorithm.advantage import group_advantages, standardized, without_spread
from tests.conftest import GOLDENS

GOLDEN = json.loads((GOLDENS / "advantages.json").read_text())


def test_advantages_are_the_published_ones():
    ours = group_advantages(torch.tensor(GOLDEN["rewards"]))
    torch.testing.assert_close(
        ours, torch.tensor(GOLDEN["advantage_clamped_5"]), rtol=1e-5, atol=1e-5
    )


def test_standardizing_forgets_scale_and_shift():
    rewards = torch.randn(
        2, 3, 8, 12, generator=torch.Generator().manual_seed(0), dtype=torch.float64
    )
    torch.testing.assert_close(
        group_advantages(rewards), group_advantages(3 * rewards + 7), rtol=1e-4, atol=1e-4
    )
    torch.testing.assert_close(
        standardized(rewards).mean(-1), torch.zeros(2, 3, 8), atol=1e-5, rtol=0
    )
    torch.testing.assert_close(
        standardized(rewards).std(-1), torch.ones(2, 3, 8), atol=1e-5, rtol=0
    )


def test_members_keep_their_places():
    rewards = torch.randn(1, 2, 3, 12, generator=torch.Generator().manual_seed(0))
    order = torch.randperm(12, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(
        group_advantages(rewards)[:, order], group_advantages(rewards[..., order])
    )


@pytest.mark.parametrize("value", [0.1, 1 / 3, 1e4])
def test_a_group_of_equals_says_nothing(value):
    rewards = torch.full((1, 1, 2, 7), value)
    rewards[0, 0, 1, 3] += 0.5
    advantages = group_advantages(rewards)
    assert (advantages[0] == 0).all()
    assert advantages[1, 3] > 0


ONE_BIT = [0.3, 0.3, 0.3, 0.30000004, *[0.3] * 8]
THREE_BITS = [*[0.3] * 11, 0.3000001]


@pytest.mark.parametrize(
    "rewards",
    [ONE_BIT, THREE_BITS, [-value for value in ONE_BIT], [1e6 * value for value in THREE_BITS]],
)
def test_equal_images_in_two_calls_of_a_scorer_have_no_advantage(rewards):
    """Nor have several granularities together, whose roundings would all have one sign."""
    group = torch.tensor(rewards).expand(1, 3, 2, 12)
    assert without_spread(group).all() and (group_advantages(group) == 0).all()
    assert (group_advantages(group, deviation=torch.tensor(1e-9)) == 0).all()


@given(
    base=st.floats(2.0**-100, 2.0**100, width=32),
    sign=st.sampled_from([-1, 1]),
    ulps=st.lists(st.integers(-2, 2), min_size=2, max_size=24),
)
def test_a_few_last_bits_are_no_spread(base, sign, ulps):
    rewards = np.full(len(ulps), base, np.float32)
    for place, steps in enumerate(ulps):
        for _ in range(abs(steps)):
            rewards[place] = np.nextafter(
                rewards[place], np.float32(np.inf if steps > 0 else -np.inf)
            )
    assert (standardized(sign * torch.from_numpy(rewards)) == 0).all()


@given(
    base=st.floats(0.125, 2.0**60, width=32),
    share=st.floats(1e-4, 1),
    members=st.integers(2, 24),
    better=st.integers(0, 23),
)
def test_what_a_scorer_can_tell_apart_has_an_advantage(base, share, members, better):
    """Even where float32 would round the mean of large, close rewards."""
    rewards = torch.full((members,), base)
    rewards[better % members] += share * base
    away = torch.where(torch.arange(members) == better % members, members - 1, -1) / members**0.5
    torch.testing.assert_close(standardized(rewards), away, rtol=5e-3, atol=0)


def test_weights_scale_their_reward():
    rewards = torch.randn(2, 1, 4, 6, generator=torch.Generator().manual_seed(0))
    only_first = group_advantages(rewards, weights=[1.0, 0.0], clip=100)
    torch.testing.assert_close(only_first, group_advantages(rewards[:1], clip=100))
    both = group_advantages(rewards, weights=[0.5, 2.0], clip=100)
    torch.testing.assert_close(both, 0.5 * only_first + 2 * group_advantages(rewards[1:], clip=100))


def test_the_sum_is_clamped_and_not_its_parts():
    rewards = torch.zeros(1, 4, 1, 12)
    rewards[..., 0] = 1.0
    unclamped = group_advantages(rewards, clip=100)[0, 0]
    assert unclamped > 5
    assert group_advantages(rewards)[0, 0] == 5


@pytest.mark.parametrize(
    "rewards, weights",
    [
        (torch.zeros(2, 3, 4), None),
        (torch.zeros(1, 1, 1, 1), None),
        (torch.zeros(2, 1, 1, 3), [1.0]),
        (torch.tensor([[[[1.0, float("nan")]]]]), None),
    ],
)
def test_unusable_rewards_are_refused(rewards, weights):
    with pytest.raises(ValueError):
        group_advantages(rewards, weights)
