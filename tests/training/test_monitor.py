"""What is measured on held-out prompts while a run trains."""

import pytest
import torch

from g2rpo_core.distributed.process_group import ProcessGroup
from g2rpo_core.models.generate import generate_images
from g2rpo_core.sampling.schedule import even_sigmas
from g2rpo_core.training.monitor import heldout_means
from tests.fixtures.rollouts import redness


@pytest.mark.parametrize("count, batch", [(5, 2), (4, 2), (1, 8)])
def test_the_mean_is_over_the_first_prompts_each_counted_once(policy, embeddings, settings, count, batch):
    sampling = settings[0].model_copy(update={"decode_batch": batch})
    measured = heldout_means(policy, embeddings, {"redness": redness}, count, sampling)
    parts = generate_images(policy, embeddings, count, even_sigmas(sampling.steps, sampling.shift), 0, count)
    whole = torch.cat([redness(images, None) for _, images in parts])
    assert len(whole) == count and measured == pytest.approx({"heldout_redness": whole.mean().item()}, rel=1e-4, abs=1e-6)


def test_processes_share_the_batches_and_find_what_one_finds(policy, embeddings, settings, monkeypatch):
    """Five prompts in batches of two, by two processes: the second makes the last batch again, and it counts once."""
    sampling = settings[0].model_copy(update={"decode_batch": 2})
    alone = heldout_means(policy, embeddings, {"redness": redness}, 5, sampling)
    told: list[dict] = []
    monkeypatch.setattr(ProcessGroup, "gather", lambda self, value: told.append(value) or [*told])
    with pytest.raises(KeyError):  # the first alone lacks the second's batches
        heldout_means(policy, embeddings, {"redness": redness}, 5, sampling, ProcessGroup(0, 2))
    together = heldout_means(policy, embeddings, {"redness": redness}, 5, sampling, ProcessGroup(1, 2))
    assert [sorted(part) for part in told] == [[0, 2], [1, 2]] and together == pytest.approx(alone, rel=1e-6)
