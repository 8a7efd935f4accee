import json

import pytest
import torch

from g2rpo_core.algorithm.advantage import group_advantages, standardized
from tests.conftest import GOLDENS

GOLDEN = json.loads((GOLDENS / "advantages.json").read_text())


def test_advantages_are_the_published_ones():
    ours = group_advantages(torch.tensor(GOLDEN["rewards"]))
    torch.testing.assert_close(ours, torch.tensor(GOLDEN["advantage_clamped_5"]), rtol=1e-5, atol=1e-5)


def test_standardizing_forgets_scale_and_shift():
    rewards = torch.randn(2, 3, 8, 12, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    torch.testing.assert_close(group_advantages(rewards), group_advantages(3 * rewards + 7), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(standardized(rewards).mean(-1), torch.zeros(2, 3, 8), atol=1e-5, rtol=0)
    torch.testing.assert_close(standardized(rewards).std(-1), torch.ones(2, 3, 8), atol=1e-5, rtol=0)


def test_members_keep_their_places():
    rewards = torch.randn(1, 2, 3, 12, generator=torch.Generator().manual_seed(0))
    order = torch.randperm(12, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(group_advantages(rewards)[:, order], group_advantages(rewards[..., order]))


@pytest.mark.parametrize("value", [0.1, 1 / 3, 1e4])
def test_a_group_of_equals_says_nothing(value):
    rewards = torch.full((1, 1, 2, 7), value)
    rewards[0, 0, 1, 3] += 0.5
    advantages = group_advantages(rewards)
    assert (advantages[0] == 0).all()
    assert advantages[1, 3] > 0


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
    [(torch.zeros(2, 3, 4), None), (torch.zeros(1, 1, 1, 1), None), (torch.zeros(2, 1, 1, 3), [1.0]), (torch.tensor([[[[1.0, float("nan")]]]]), None)],
)  # fmt: skip
def test_unusable_rewards_are_refused(rewards, weights):
    with pytest.raises(ValueError):
        group_advantages(rewards, weights)
