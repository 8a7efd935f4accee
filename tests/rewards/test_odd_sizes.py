"""Images of one pixel, and as long as they may be: each reward scores them, or says why not."""

import pytest
import torch
from PIL import Image

from g2rpo_core.rewards import registry
from g2rpo_core.rewards.geneval import geneval
from tests.rewards.test_geneval import clip, masks  # noqa: F401 - fixtures

CPU = torch.device("cpu")
SIZES = [(1, 1), (1, 2), (2, 1), (3, 3), (1, 100), (100, 1), (3, 300), (13, 27), (29, 57)]
BLANK = [Image.new("RGB", size, "red") for size in SIZES]


def test_an_image_of_any_size_has_a_score(models):
    """Nine sizes, by four rewards that read a crop, a square or a padded image."""
    for name in ("hps", "clip_score", "pickscore", "image_reward"):
        scores = registry.load([name], models)[name](BLANK, ["a red circle"] * len(SIZES))
        assert scores.shape == (9,) and scores.isfinite().all(), name


@pytest.mark.pipeline
def test_a_detector_looks_at_an_image_of_any_size(masks, clip):  # noqa: F811
    reward = geneval(masks, clip, CPU)
    for size, image in zip(SIZES, BLANK):
        (score,), (reason,) = reward.score_with_reasons([image], ["a photo of a cat"])
        assert score.isfinite() and reason is None, (size, reason)
