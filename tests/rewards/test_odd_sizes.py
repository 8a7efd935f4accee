"""Images of one pixel, and as long as they may be: each reward scores them, or says why not."""

import pytest
import torch
from PIL import Image

from g2rpo_core.rewards import registry
from g2rpo_core.rewards.geneval import geneval
from g2rpo_core.rewards.unified_reward import InProcess, UnifiedReward
from tests.rewards.test_geneval import clip, masks  # noqa: F401 - fixtures
from tests.rewards.test_vlm import llava  # noqa: F401

CPU = torch.device("cpu")
SIZES = [(1, 1), (1, 2), (2, 1), (3, 3), (1, 100), (100, 1), (3, 300), (13, 27), (29, 57)]
BLANK = [Image.new("RGB", size, "red") for size in SIZES]


def test_an_image_of_any_size_has_a_score(models):
    """Nine sizes, by four rewards that read a crop, a square or a padded image."""
    for name in ("hps", "clip_score", "pickscore", "image_reward"):
        scores = registry.load([name], models)[name](BLANK, ["a red circle"] * len(SIZES))
        assert scores.shape == (9,) and scores.isfinite().all(), name


@pytest.mark.pipeline
def test_a_vision_language_model_is_asked_about_an_image_of_any_size(models, llava):  # noqa: F811
    """Qwen2.5-VL's processor and LLaVA-OneVision's; untrained, their answers are no scores."""
    for folder in (models / "unified_reward", llava):
        reward = UnifiedReward(InProcess(folder, CPU, 1, 4), "final_score.v1")
        _, reasons = reward.score_with_reasons(BLANK, ["a red circle"] * len(SIZES))
        assert all(each is None or each.startswith("not a score") for each in reasons), reasons


@pytest.mark.pipeline
def test_a_detector_looks_at_an_image_of_any_size(masks, clip):  # noqa: F811
    reward = geneval(masks, clip, CPU)
    for size, image in zip(SIZES, BLANK):
        (score,), (reason,) = reward.score_with_reasons([image], ["a photo of a cat"])
        assert score.isfinite() and reason is None, (size, reason)


@pytest.mark.pipeline
@pytest.mark.slow
def test_text_is_read_in_an_image_of_any_size_or_refused_by_it(models):
    """RapidOCR's own models."""
    reward = registry.load(["ocr"], models)["ocr"]
    scores, reasons = reward.score_with_reasons(BLANK, ['a sign that says "hi"'] * len(SIZES))
    refused = [size for size, reason in zip(SIZES, reasons) if "times as high as wide" in reason]
    assert (
        refused
        == [(1, 100), (3, 300)]
        == [size for size, score in zip(SIZES, scores.isnan().tolist()) if score]
    )
