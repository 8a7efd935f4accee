"""PickScore against transformers used directly, as the published model card uses it."""

import pytest
import torch
from transformers import AutoTokenizer, CLIPImageProcessorPil, CLIPModel

from g2rpo_core import rewards

from .pictures import PICTURES, PROMPTS


@pytest.fixture(scope="module")
def published(models):
    """(picture, prompt) -> logit scale times cosine, with transformers' own model, tokenizer and preprocessing."""
    model = CLIPModel.from_pretrained(models / "pickscore").eval()
    tokenizer = AutoTokenizer.from_pretrained(models / "pickscore_processor")
    processor = CLIPImageProcessorPil.from_pretrained(models / "pickscore_processor")

    @torch.no_grad()
    def score(picture, prompt):
        outputs = model(**tokenizer(prompt, return_tensors="pt"), **processor(picture, return_tensors="pt"))
        return outputs.logits_per_image.item()

    return score


def test_equals_transformers_over_100(models, published):
    ours = rewards.load(["pickscore"], models)["pickscore"](list(PICTURES.values()), PROMPTS)
    theirs = torch.tensor([published(*pair) for pair in zip(PICTURES.values(), PROMPTS)]) / 100
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)


def test_a_text_over_the_models_length_is_cut(models, published):
    scorer = rewards.load(["pickscore"], models)["pickscore"]
    long = "a red circle " * 60
    assert scorer([PICTURES["square"]], [long]).isfinite().all()
