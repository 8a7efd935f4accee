"""Our scores against those of the published packages, with the same weights and the same pictures."""

import json

import pytest
import torch
from transformers import AutoTokenizer

from g2rpo_core import rewards
from g2rpo_core.rewards.image_reward import image_reward

from .pictures import PICTURES, PROMPTS
from .upstream import hpsv2_model, image_reward_model


@torch.no_grad()
def test_hps_equals_hpsv2(models):
    architecture = json.loads((models / "hps" / "tiny-ViT.json").read_text())
    model, preprocess, tokenize = hpsv2_model(architecture, models / "hps" / "HPS_v2.1_compressed.pt")
    pictures = PICTURES | {"transparent": PICTURES["transparent"].convert("RGB")}

    def score(picture, prompt) -> float:  # as hpsv2.img_score has it
        outputs = model(preprocess(picture)[None], tokenize([prompt]))
        return torch.diagonal(outputs["image_features"] @ outputs["text_features"].T).item()

    theirs = torch.tensor([score(*pair) for pair in zip(pictures.values(), PROMPTS)])
    ours = rewards.load(["hps"], models)["hps"](list(PICTURES.values()), PROMPTS)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)
    assert theirs.std() > 1e-3
    with pytest.raises(RuntimeError, match="4 channels"):  # what hpsv2 cannot score, we do as RGB
        model.encode_image(preprocess(PICTURES["transparent"])[None])


def test_image_reward_equals_image_reward(models, tmp_path):
    """With weights far from those of a start, so that every layer and the cross-attention matter."""
    tokenizer = AutoTokenizer.from_pretrained(models / "image_reward_tokenizer")
    med_config = models / "image_reward" / "med_config.json"
    weights = torch.load(models / "image_reward" / "ImageReward.pt", weights_only=True)
    generator = torch.Generator().manual_seed(0)
    for key, value in weights.items():
        if value.is_floating_point():
            weights[key] = value + 0.1 * torch.randn(value.shape, generator=generator)
    torch.save(weights, tmp_path / "ImageReward.pt")
    (tmp_path / "med_config.json").write_text(med_config.read_text())

    published = image_reward_model(
        med_config,
        tokenizer,
        {"img_size": 32, "patch_size": 8, "embed_dim": 128, "depth": 2, "num_heads": 2},
        hidden=json.loads(med_config.read_text())["hidden_size"],
    )
    published.load_state_dict(weights)
    theirs = torch.tensor([published.score(prompt, picture) for picture, prompt in zip(PICTURES.values(), PROMPTS)])
    ours = image_reward(tmp_path, models / "image_reward_tokenizer", torch.device("cpu"))
    scores = ours(list(PICTURES.values()), PROMPTS)
    torch.testing.assert_close(scores, theirs, rtol=1e-5, atol=1e-5)
    assert theirs.std() > 0.1
    another = ours([PICTURES["square"]] * 8, PROMPTS)
    assert (another - scores).abs().max() > 0.01  # the picture matters as the prompt does
