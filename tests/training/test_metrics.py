"""Records of an iteration, and what is measured on held-out prompts while a run trains."""

import pytest
import torch

from g2rpo_core.distributed.process_group import ProcessGroup
from g2rpo_core.models.generate import generate_images
from g2rpo_core.sampling.schedule import even_sigmas
from g2rpo_core.training.metrics import HeldOut, granularity_correlation
from tests.fixtures.rollouts import redness


def test_granularities_are_correlated_within_each_group_with_the_finest():
    rng = torch.Generator().manual_seed(0)
    finest = torch.randn(2, 3, 4, 1, 12, generator=rng)
    noise = torch.randn(2, 3, 4, 1, 12, generator=rng)
    rewards = torch.cat([finest, 2 * finest + 5, -finest, finest + noise], 3)
    metrics = granularity_correlation(rewards, ["a", "b_c"], (1, 2, 3, 6))
    assert metrics["correlation_a_2"] == pytest.approx(1) and metrics[
        "correlation_b_c_3"
    ] == pytest.approx(-1)
    assert metrics["gap_a_2"] == pytest.approx(5 + finest[0].mean().item(), abs=1e-5)
    expected = torch.stack(
        [
            torch.corrcoef(torch.stack(pair))[0, 1]
            for pair in zip(finest[1].view(-1, 12), (finest + noise)[1].view(-1, 12))
        ]
    )
    assert metrics["correlation_b_c_6"] == pytest.approx(expected.mean().item(), abs=1e-5)
    assert granularity_correlation(finest, ["a", "b_c"], (3,)) == {}


@pytest.mark.parametrize("count, batch", [(5, 2), (4, 2), (1, 8)])
def test_the_mean_is_over_the_first_prompts_each_counted_once(
    policy, embeddings, settings, count, batch
):
    sampling = settings[0].model_copy(update={"decode_batch": batch})
    measured = HeldOut(policy, embeddings, {"redness": redness}, count, sampling)()
    parts = generate_images(
        policy, embeddings, count, even_sigmas(sampling.steps, sampling.shift), 0, count
    )
    whole = torch.cat([redness(images, None) for _, images in parts])
    assert len(whole) == count and measured == pytest.approx(
        {"heldout_redness": whole.mean().item()}, rel=1e-4, abs=1e-6
    )


def test_processes_share_the_batches_and_find_what_one_finds(
    policy, embeddings, settings, monkeypatch
):
    """The second of two makes the last batch again, and it counts once."""
    sampling = settings[0].model_copy(update={"decode_batch": 2})
    alone = HeldOut(policy, embeddings, {"redness": redness}, 5, sampling)()
    told: list[dict] = []
    monkeypatch.setattr(ProcessGroup, "gather", lambda self, value: told.append(value) or [*told])
    with pytest.raises(KeyError):  # the first alone lacks the second's batches
        HeldOut(policy, embeddings, {"redness": redness}, 5, sampling, ProcessGroup(0, 2))()
    together = HeldOut(policy, embeddings, {"redness": redness}, 5, sampling, ProcessGroup(1, 2))()
    assert [sorted(part) for part in told] == [[0, 2], [1, 2]] and together == pytest.approx(
        alone, rel=1e-6
    )
