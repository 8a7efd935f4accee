"""UnifiedReward in this process: both families of models against transformers used directly, and the teaching of the tiny one."""

import pytest
import torch
from torchvision.transforms.v2 import functional as TF
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

from g2rpo_core.foundation.errors import UserError
from g2rpo_core.rewards import registry as rewards
from g2rpo_core.rewards.preprocess import eight_bit
from g2rpo_core.rewards.unified_reward import InProcess, conversation, parse, question
from g2rpo_core.tasks.table import TASKS
from g2rpo_core.tiny_models.settings import FitSettings
from g2rpo_core.tiny_models.unified_reward import TEMPLATE, answer, processor, tokenizer, train_vlm
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
    """One image at a time and as PIL images there, several at once and as tensors here."""
    questions = [question(TEMPLATE, prompt) for prompt in PROMPTS]
    images = [image.convert("RGB") for image in IMAGES.values()]
    model, inputs_of = (
        AutoModelForImageTextToText.from_pretrained(folder).eval(),
        AutoProcessor.from_pretrained(folder),
    )
    expected = []
    for image, text in zip(images, questions):
        chat = inputs_of.apply_chat_template(
            conversation(text), add_generation_prompt=True, tokenize=False
        )
        inputs = inputs_of(text=[chat], images=[image], return_tensors="pt")
        made = model.generate(**inputs, max_new_tokens=6, do_sample=False)
        expected.append(
            inputs_of.decode(made[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        )
    assert len(set(expected)) > 1 and all(expected)
    assert (
        InProcess(folder, CPU, micro_batch=3, max_new_tokens=6)(
            [[image] for image in eight_bit(images)], questions
        )
        == expected
    )


def test_questions_about_two_images_are_answered_as_by_transformers(folder):
    """A question at a time there, several at once here; the order of the images matters."""
    images = [image.convert("RGB") for image in IMAGES.values()]
    pairs = [(0, 1), (1, 0), (2, 5), (5, 2), (3, 4)]
    questions = [question("rank.v1", PROMPTS[first + second]) for first, second in pairs]
    model, inputs_of = (
        AutoModelForImageTextToText.from_pretrained(folder).eval(),
        AutoProcessor.from_pretrained(folder),
    )
    expected = []
    for (first, second), text in zip(pairs, questions):
        chat = inputs_of.apply_chat_template(
            conversation(text, 2), add_generation_prompt=True, tokenize=False
        )
        inputs = inputs_of(
            text=[chat], images=[[images[first], images[second]]], return_tensors="pt"
        )
        made = model.generate(**inputs, max_new_tokens=6, do_sample=False)
        expected.append(
            inputs_of.decode(made[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        )
    files = eight_bit(images)
    shown = [[files[first], files[second]] for first, second in pairs]
    assert InProcess(folder, CPU, micro_batch=3, max_new_tokens=6)(shown, questions) == expected
    assert len(set(expected)) > 1 and all(expected)


def test_tensors_and_pil_images_are_the_same_to_the_model():
    image = IMAGES["wide"]
    tensor = TF.to_dtype(TF.pil_to_tensor(image.convert("RGB")), torch.float32, scale=True)[None]
    assert torch.equal(eight_bit(tensor)[0], eight_bit([image])[0])


def test_the_profile_s_reward_is_the_model_that_was_built(models):
    section = {"unified_reward": {"micro_batch": 4, "max_new_tokens": 4}}
    reward = rewards.load(["unified_reward"], models, section=section)["unified_reward"]
    scores, reasons = reward.score_with_reasons(
        torch.rand(5, 3, 32, 32), ["a large red circle at the left"] * 5
    )
    assert scores.isnan().all() and all(
        reason.startswith("not a score: ") for reason in reasons
    )  # four tokens are too few for one


def test_the_dtype_is_that_of_the_files_or_the_one_asked_for(folder):
    questions = [question(TEMPLATE, prompt) for prompt in PROMPTS[:2]]
    images = [[image] for image in eight_bit([IMAGES["square"], IMAGES["wide"]])]
    assert InProcess(folder, CPU, 2, 2).model.dtype == torch.float32
    half = InProcess(folder, CPU, 2, 2, "bfloat16")
    assert half.model.dtype == torch.bfloat16 and all(
        isinstance(answer, str) for answer in half(images, questions)
    )


def test_weights_are_read_onto_the_device_without_passing_the_host(folder, monkeypatch):
    """A device without data, in the place of a GPU: all weights are there before anything is moved."""
    before, plain = set(), torch.nn.Module.to

    def moved(module, *arguments, **more):
        before.update(tensor.device.type for tensor in module.parameters())
        return plain(module, *arguments, **more)

    monkeypatch.setattr(torch.nn.Module, "to", moved)
    loaded = InProcess(folder, torch.device("meta"), 1, 1).model
    assert before == {"meta"} == {tensor.device.type for tensor in loaded.parameters()}


def test_a_model_of_another_family_is_refused_by_name(models):
    with pytest.raises(
        UserError,
        match=(
            "pickscore: is a model of type 'clip', .* serve it and set "
            "rewards.unified_reward.server"
        ),
    ):
        InProcess(models / "pickscore", CPU, 1, 1)


@pytest.mark.parametrize(
    "shown, spoilt, score",
    [
        ("a small blue cross above a large green square", False, 5.0),
        ("a small blue cross above a large green square", True, 3.0),
        ("a small red cross above a large green square", False, 4.0),
        ("a large red circle below a small black triangle", True, 1.0),
    ],
)
def test_the_answers_taught_are_in_the_template_s_words(shown, spoilt, score):
    caption = "a small blue cross above a large green square"
    text = answer(SHAPES, SHAPES.parse(caption), SHAPES.parse(shown), spoilt)
    assert parse(TEMPLATE, text) == score
    assert text.split("\n")[3].startswith("above (layout): ")
    held = [line.endswith(": 1") for line in text.split("\n")[:-1]]
    assert held == [
        a == s
        for a, s in zip(
            SHAPES.elements(SHAPES.parse(caption)), SHAPES.elements(SHAPES.parse(shown))
        )
    ]
    words = tokenizer(SHAPES)
    assert (
        words.decode(words(text)["input_ids"]) == text
        and len(words(text)["input_ids"]) == 2 * 7 + 2
    )


@pytest.mark.pipeline
def test_the_same_seed_teaches_the_same_weights():
    how = FitSettings(steps=2, batch=4, learning_rate=1e-3)
    first, second, other = (train_vlm(SHAPES, how, seed)[0].state_dict() for seed in (1, 1, 2))
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not all(torch.equal(first[name], other[name]) for name in first)
