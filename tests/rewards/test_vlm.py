"""UnifiedReward in this process, against transformers."""

import torch
from transformers import (
    AutoModelForImageTextToText,
    AutoProcessor,
)

from g2rpo_core.rewards.preprocess import eight_bit
from g2rpo_core.rewards.unified_reward import InProcess, conversation, question
from g2rpo_core.tiny_models.unified_reward import TEMPLATE
from tests.fixtures.errors import refused
from tests.fixtures.images import IMAGES, PROMPTS

CPU = torch.device("cpu")


def test_answers_are_those_of_transformers_used_directly(models):
    """One question at a time there, several at once here."""
    folder = models / "unified_reward"
    images = [image.convert("RGB") for image in IMAGES.values()]
    questions = [question(TEMPLATE, prompt) for prompt in PROMPTS]
    model = AutoModelForImageTextToText.from_pretrained(folder).eval()
    inputs_of = AutoProcessor.from_pretrained(folder)
    expected = []
    for image, text in zip(images, questions):
        chat = inputs_of.apply_chat_template(
            conversation(text), add_generation_prompt=True, tokenize=False
        )
        inputs = inputs_of(text=[chat], images=[image], return_tensors="pt")
        made = model.generate(**inputs, max_new_tokens=6, do_sample=False)
        new = made[0, inputs["input_ids"].shape[1] :]
        expected.append(inputs_of.decode(new, skip_special_tokens=True))
    assert len(set(expected)) > 1 and all(expected)
    asked = InProcess(folder, CPU, micro_batch=3, max_new_tokens=6)
    assert asked(eight_bit(images), questions) == expected


def test_the_dtype_is_that_of_the_files_or_the_one_asked_for(models):
    folder = models / "unified_reward"
    assert InProcess(folder, CPU, 2, 2).model.dtype == torch.float32
    assert InProcess(folder, CPU, 2, 2, "bfloat16").model.dtype == torch.bfloat16


def test_a_model_of_another_family_is_refused_by_name(models):
    told = "pickscore: is a model of type 'clip', .* serve it and set rewards.unified_reward.server"
    with refused(told):
        InProcess(models / "pickscore", CPU, 1, 1)
