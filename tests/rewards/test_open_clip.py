"""HPS-v2.1 and CLIP Score against open_clip used directly."""

import json

import pytest
import torch
from torchvision.transforms.v2 import functional as TF

from g2rpo_core.rewards import registry as rewards
from reference import upstream_scorers as upstream
from tests.fixtures.images import IMAGES, PROMPTS


@pytest.fixture(scope="module")
def scorers(models):
    return rewards.load(["hps", "clip_score"], models)


def test_clip_score_equals_open_clip(models, scorers):
    published = upstream.clip_score(models / "clip_score", torch.device("cpu"))
    assert json.loads((models / "clip_score" / "open_clip_config.json").read_text())["preprocess_cfg"]["resize_mode"] == "squash"
    theirs = torch.tensor([published(prompt, [image])[0] for image, prompt in zip(IMAGES.values(), PROMPTS)])
    torch.testing.assert_close(scorers["clip_score"](list(IMAGES.values()), PROMPTS), theirs, rtol=0, atol=1e-5)
    assert theirs.std() > 1e-3


def test_hps_pads_the_longest_side_and_clip_score_squashes(scorers):
    cpu, wide = torch.device("cpu"), torch.ones(1, 3, 40, 80)
    preprocess = scorers["hps"].preprocess
    padded = TF.normalize(preprocess(wide, cpu), [0] * 3, [1 / s for s in preprocess.std])
    padded = padded + torch.tensor(preprocess.mean).view(3, 1, 1)
    assert padded.shape == (1, 3, 32, 32)
    torch.testing.assert_close(padded[0, 0, :, 16], torch.tensor([0.0] * 8 + [1.0] * 16 + [0.0] * 8), atol=1e-5, rtol=0)
    squashed = scorers["clip_score"].preprocess(wide, cpu)
    assert squashed.shape == (1, 3, 32, 32) and squashed.std((2, 3)).max() < 1e-5
