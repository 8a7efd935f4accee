"""UnifiedReward in this process, against transformers."""

import pytest
import torch
from transformers import (
    AutoModelForImageTextToText,
    AutoProcessor,
    LlavaOnevisionConfig,
    LlavaOnevisionForConditionalGeneration,
    LlavaOnevisionImageProcessor,
    LlavaOnevisionProcessor,
    LlavaOnevisionVideoProcessor,
    Qwen2Config,
    SiglipVisionConfig,
)

from g2rpo_core.rewards.preprocess import eight_bit
from g2rpo_core.rewards.unified_reward import InProcess, conversation, question
from g2rpo_core.tasks.table import TASKS
from g2rpo_core.tiny_models.unified_reward import TEMPLATE, processor, tokenizer
from tests.fixtures.errors import refused
from tests.fixtures.images import IMAGES, PROMPTS

CPU = torch.device("cpu")
SHAPES = TASKS["shapes"]


@pytest.fixture(scope="module")
def llava(tmp_path_factory):
    """A LLaVA-OneVision of a few thousand weights."""
    words = tokenizer(SHAPES)
    words.add_special_tokens({"additional_special_tokens": ["<image>", "<video>"]})
    image, video, end = words.convert_tokens_to_ids(["<image>", "<video>", "<|im_end|>"])
    vision = SiglipVisionConfig(
        image_size=28,
        patch_size=14,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        vision_use_head=False,
    )
    text = Qwen2Config(
        vocab_size=len(words),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        bos_token_id=None,
        eos_token_id=end,
        pad_token_id=end,
        initializer_range=0.3,
    )
    grid = [[28, 28], [56, 56]]
    config = LlavaOnevisionConfig(
        vision_config=vision,
        text_config=text,
        image_token_index=image,
        video_token_index=video,
        image_grid_pinpoints=grid,
        vision_feature_select_strategy="full",
        vision_feature_layer=-1,
    )
    chat = processor(SHAPES).chat_template.replace(
        "<|vision_start|><|image_pad|><|vision_end|>", "<image>\n"
    )
    size = {"height": 28, "width": 28}
    made = LlavaOnevisionProcessor(
        image_processor=LlavaOnevisionImageProcessor(size=size, image_grid_pinpoints=grid),
        tokenizer=words,
        video_processor=LlavaOnevisionVideoProcessor(size=size),
        num_image_tokens=4,
        vision_feature_select_strategy="full",
        chat_template=chat,
        image_token="<image>",
        video_token="<video>",
    )
    folder = tmp_path_factory.mktemp("llava")
    torch.manual_seed(0)
    LlavaOnevisionForConditionalGeneration(config).save_pretrained(folder)
    made.save_pretrained(folder)
    return folder


@pytest.fixture(params=["qwen", "llava"])
def folder(request, models):
    return (
        models / "unified_reward" if request.param == "qwen" else request.getfixturevalue("llava")
    )


def test_answers_are_those_of_transformers_used_directly(folder):
    """One question at a time there, several at once here."""
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
