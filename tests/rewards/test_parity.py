"""Our scores against those of the published packages, with the same weights and the same images."""

import pytest
import torch

from g2rpo_core.common.model_store import ModelStore
from g2rpo_core.rewards import packages
from g2rpo_core.rewards import registry as rewards
from g2rpo_core.rewards.image_reward import image_reward
from tests.fixtures.images import IMAGES, PROMPTS

pytestmark = pytest.mark.pipeline

CPU = torch.device("cpu")


def test_hps_equals_hpsv2(models):
    store = ModelStore(models)
    published = packages.hpsv2(store.folder("hps"), store.entry("hps")["architecture"], CPU)
    images = IMAGES | {"transparent": IMAGES["transparent"].convert("RGB")}
    theirs = torch.tensor([published(prompt, [image])[0] for image, prompt in zip(images.values(), PROMPTS)])
    ours = rewards.load(["hps"], models)["hps"](list(IMAGES.values()), PROMPTS)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)
    assert theirs.std() > 1e-3
    with pytest.raises(RuntimeError, match="4 channels"):  # what hpsv2 cannot score, we do as RGB
        published(PROMPTS[0], [IMAGES["transparent"]])


def test_image_reward_equals_image_reward(models, tmp_path):
    """With weights far from those of a start, so that every layer and the cross-attention matter."""
    tokenizer, med_config = models / "image_reward_tokenizer", models / "image_reward" / "med_config.json"
    weights = torch.load(models / "image_reward" / "ImageReward.pt", weights_only=True)
    generator = torch.Generator().manual_seed(0)
    for key, value in weights.items():
        if value.is_floating_point():
            weights[key] = value + 0.1 * torch.randn(value.shape, generator=generator)
    torch.save(weights, tmp_path / "ImageReward.pt")
    (tmp_path / "med_config.json").write_text(med_config.read_text())

    published = packages.image_reward(tmp_path, tokenizer, CPU)
    theirs = torch.tensor([published(prompt, [image])[0] for image, prompt in zip(IMAGES.values(), PROMPTS)])
    ours = image_reward(tmp_path, tokenizer, CPU)
    scores = ours(list(IMAGES.values()), PROMPTS)
    torch.testing.assert_close(scores, theirs, rtol=1e-5, atol=1e-5)
    assert theirs.std() > 0.1
    another = ours([IMAGES["square"]] * 8, PROMPTS)
    assert (another - scores).abs().max() > 0.01  # the image matters as the prompt does
