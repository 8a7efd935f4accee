"""Scores of test prompts, and what is asked of a profile."""

import pytest
import torch

from g2rpo_core.evaluation import image_stats
from g2rpo_core.evaluation.evaluate import evaluate_batch
from g2rpo_core.evaluation.settings import EvaluationSettings
from g2rpo_core.sampling.schedule import even_sigmas


def test_rows_of_a_batch_hold_rewards_image_statistics_and_diversity(policy, embeddings):
    settings = EvaluationSettings(
        steps=(2,), height=32, width=32, rewards=("red",), seed=3, batch=4, diversity={"prompts": 6, "noises": 3}
    )
    red = lambda images, prompts: images[:, 0].mean((1, 2))
    measured = {}  # batch -> the prompts whose diversity is measured with it
    for number in range(6):
        _, images, rows = evaluate_batch(policy, embeddings, {"red": red}, settings, even_sigmas(2, 3.0), number, 1.0)
        torch.testing.assert_close(rows[rows.reward == "red"].score.tolist(), red(images, None).tolist())
        assert rows[rows.reward == "sharpness"].score.tolist() == pytest.approx(image_stats.sharpness(images).tolist())
        measured[number] = rows[rows.reward == "diversity"].prompt_id.tolist()
        assert (rows[rows.reward == "diversity"].score > 0).all()
    ids = [prompt.id for prompt in embeddings.prompts]
    assert measured == {0: ids[:4], 1: ids[4:6], 2: [], 3: [], 4: [], 5: []}


@pytest.mark.parametrize("change", [{"steps": ()}, {"steps": (4, 4)}, {"checkpoints": ("last",)}, {"trained_share": 1.1}])
def test_settings_that_cannot_be_are_refused(tiny, change):
    with pytest.raises(ValueError):
        EvaluationSettings.model_validate({**tiny.evaluation.model_dump(), **change})
