import pytest
import torch
from PIL import Image
from torchvision.transforms.v2 import functional as TF

from g2rpo_core import rewards
from g2rpo_core.errors import UserError
from g2rpo_core.rewards.open_clip import CosineScore


@pytest.fixture(scope="module")
def scorers(models):
    return rewards.load(["hps", "clip_score"], models)


@pytest.fixture
def images():
    return torch.rand(6, 3, 32, 32, generator=torch.Generator().manual_seed(0))


PROMPTS = ["a large red circle at the left", "a small blue cross above a large green square"] * 3


@pytest.mark.parametrize("name", ["hps", "clip_score"])
def test_score_is_the_cosine_under_open_clip_itself(scorers, images, name):
    scorer: CosineScore = scorers[name]
    mean, std = torch.tensor(scorer.mean).view(3, 1, 1), torch.tensor(scorer.std).view(3, 1, 1)
    with torch.no_grad():
        picture = scorer.model.encode_image((images - mean) / std)
        text = scorer.model.encode_text(scorer.tokenize(PROMPTS))
    expected = torch.cosine_similarity(picture, text)
    torch.testing.assert_close(scorer(images, PROMPTS), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["hps", "clip_score"])
def test_a_batch_equals_its_parts_and_texts_are_encoded_once(scorers, images, name, monkeypatch):
    scorer = scorers[name]
    together = scorer(images, PROMPTS)
    calls = []
    monkeypatch.setattr(scorer.model, "encode_text", lambda *a, **k: calls.append(a))
    alone = torch.cat([scorer(images[n : n + 1], PROMPTS[n : n + 1]) for n in range(6)])
    torch.testing.assert_close(together, alone, rtol=1e-5, atol=1e-5)
    assert not calls


def test_hps_pads_the_longest_side_and_clip_score_squashes(scorers):
    wide = torch.ones(1, 3, 40, 80)
    padded = TF.normalize(scorers["hps"].preprocess(wide), [0] * 3, [1 / s for s in scorers["hps"].std])
    padded = padded + torch.tensor(scorers["hps"].mean).view(3, 1, 1)
    assert padded.shape == (1, 3, 32, 32)
    torch.testing.assert_close(padded[0, 0, :, 16], torch.tensor([0.0] * 8 + [1.0] * 16 + [0.0] * 8), atol=1e-5, rtol=0)
    squashed = scorers["clip_score"].preprocess(wide)
    assert squashed.shape == (1, 3, 32, 32) and squashed.std((2, 3)).max() < 1e-5


def test_resizing_a_tensor_is_close_to_resizing_the_picture(scorers):
    """PIL rounds to 8 bits between its two passes; nothing else may differ."""
    picture = Image.effect_mandelbrot((90, 60), (-2, -1.5, 1, 1.5), 50).convert("RGB")
    tensor = TF.to_dtype(TF.pil_to_tensor(picture), torch.float32, scale=True)[None]
    resized = TF.to_dtype(TF.pil_to_tensor(picture.resize((32, 32), Image.Resampling.BICUBIC)), torch.float32, scale=True)
    ours = scorers["clip_score"].preprocess(tensor)[0] * torch.tensor(scorers["clip_score"].std).view(3, 1, 1)
    ours = ours + torch.tensor(scorers["clip_score"].mean).view(3, 1, 1)
    assert (ours - resized).abs().max() < 2.5 / 255


def test_every_picture_needs_a_prompt(scorers, images):
    with pytest.raises(ValueError, match="6 pictures and 2 prompts"):
        scorers["hps"](images, PROMPTS[:2])


def test_missing_models_say_which_stage_makes_them(tmp_path):
    with pytest.raises(UserError, match="dvc repro models"):
        rewards.load(["hps"], tmp_path)
