import pytest
import torch

from g2rpo_core.training.metrics import granularity_correlation


def test_granularities_are_correlated_within_each_group_with_the_finest():
    rng = torch.Generator().manual_seed(0)
    finest = torch.randn(2, 3, 4, 1, 12, generator=rng)
    noise = torch.randn(2, 3, 4, 1, 12, generator=rng)
    rewards = torch.cat([finest, 2 * finest + 5, -finest, finest + noise], 3)
    metrics = granularity_correlation(rewards, ["a", "b_c"], (1, 2, 3, 6))
    assert metrics["correlation_a_2"] == pytest.approx(1) and metrics["correlation_b_c_3"] == pytest.approx(-1)
    assert metrics["gap_a_2"] == pytest.approx(5 + finest[0].mean().item(), abs=1e-5)
    expected = torch.stack(
        [torch.corrcoef(torch.stack(pair))[0, 1] for pair in zip(finest[1].view(-1, 12), (finest + noise)[1].view(-1, 12))]
    )
    assert metrics["correlation_b_c_6"] == pytest.approx(expected.mean().item(), abs=1e-5)
    assert granularity_correlation(finest, ["a", "b_c"], (3,)) == {}
