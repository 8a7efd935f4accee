"""HPSv3 against the published package's own model and words, on random weights."""

import ast
import importlib.util
import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    Qwen2VLConfig,
    Qwen2VLImageProcessor,
    Qwen2VLProcessor,
    Qwen2VLVideoProcessor,
)

from g2rpo_core.rewards.hpsv3 import TEMPLATE, TOKEN, HPSv3Settings, hpsv3, read_processor
from g2rpo_core.rewards.unified_reward import conversation, question, read_template
from g2rpo_core.tasks.table import TASKS
from g2rpo_core.tiny_models.tokenizers import byte_level
from g2rpo_core.tiny_models.unified_reward import CHAT, END, SPECIAL, ids_and_text
from tests.fixtures.errors import refused
from tests.fixtures.hpsv3_package import hpsv3_model, package_file
from tests.fixtures.images import IMAGES, PROMPTS, SEEN

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """The package's model on a small Qwen2-VL with patches of the real size, and its files."""
    base, folder = tmp_path_factory.mktemp("base"), tmp_path_factory.mktemp("hpsv3")
    before, after = read_template(TEMPLATE).split("{prompt}")
    words = byte_level(TASKS["shapes"].phrases, SPECIAL, [before, *after.split(TOKEN)])
    words.pad_token = words.eos_token = END
    Qwen2VLProcessor(
        image_processor=Qwen2VLImageProcessor(),
        video_processor=Qwen2VLVideoProcessor(),
        tokenizer=words,
        chat_template=CHAT,
    ).save_pretrained(base)
    ids, text = ids_and_text(words)
    vision = {
        "depth": 2,
        "embed_dim": 64,
        "hidden_size": 64,
        "mlp_ratio": 2,
        "num_heads": 2,
        "patch_size": 14,
        "spatial_patch_size": 14,
    }
    Qwen2VLConfig(text_config=text, vision_config=vision, **ids).save_pretrained(base)
    _, token = read_processor(base)
    config = Qwen2VLConfig.from_pretrained(base)
    config.text_config.vocab_size = token + 1
    torch.manual_seed(0)
    model = hpsv3_model(config, token)
    with torch.no_grad():  # far from those of a start, so that every layer matters
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    save_file(
        {name: value.contiguous() for name, value in model.state_dict().items()},
        folder / "HPSv3.safetensors",
    )
    return model, folder, base


@torch.no_grad()
def their_scores(model, base) -> torch.Tensor:
    """One image at a time, resized by the package, as its `HPSv3RewardInferencer` asks."""
    spec = importlib.util.spec_from_file_location("hpsv3_utils", package_file("dataset/utils.py"))
    utils = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(utils)
    processor, _ = read_processor(base)
    scores = []
    for image, prompt in zip(SEEN.values(), PROMPTS):
        area = 256 * 28 * 28
        resized = utils.fetch_image({"image": image, "min_pixels": area, "max_pixels": area})
        chat = conversation(question(TEMPLATE, prompt))
        text = processor.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        batch = processor(text=[text], images=[resized], return_tensors="pt")
        batch.pop("mm_token_type_ids", None)  # which the processors of that time did not make
        scores.append(model(return_dict=True, **batch)["logits"][0, 0])
    return torch.stack(scores)


@pytest.mark.pipeline
def test_scores_are_those_of_the_published_model(published):
    """Several images in a call here, one there; bfloat16 is near, and its head stays float32."""
    model, folder, base = published
    theirs = their_scores(model, base)
    images = list(IMAGES.values())
    ours = hpsv3(folder, base, CPU, HPSv3Settings(micro_batch=3))(images, PROMPTS)
    assert ours.dtype == torch.float32 and theirs.std() > 0.01
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    half = hpsv3(folder, base, CPU, HPSv3Settings(dtype="bfloat16"))
    assert (
        half.model.trunk.dtype == torch.bfloat16 and half.model.head[0].weight.dtype == ours.dtype
    )
    assert 0 < (half(images, PROMPTS) - ours).abs().max() < 0.1


def test_the_instruction_is_the_published_one_word_for_word():
    tree = ast.parse(package_file("dataset/data_collator_qwen.py").read_text(encoding="utf-8"))
    texts = {
        part.targets[0].id: part.value.value
        for part in tree.body
        if isinstance(part, ast.Assign) and isinstance(part.value, ast.Constant)
    }
    theirs = texts["INSTRUCTION"].format(text_prompt="a {red} circle")
    theirs += texts["prompt_with_special_token"]
    assert question(TEMPLATE, "a {red} circle") == theirs and theirs.count(TOKEN) == 1


def test_files_that_do_not_fit_are_refused_in_one_line(published, tmp_path):
    _, folder, base = published
    weights = load_file(folder / "HPSv3.safetensors")
    del weights["model.layers.0.mlp.up_proj.weight"]
    save_file(weights, tmp_path / "HPSv3.safetensors")
    with refused("not the weights of HPSv3: "):
        hpsv3(tmp_path, base, CPU)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "clip"}))
    with refused("is a model of type 'clip', but HPSv3 is a qwen2_vl: take Qwen/Qwen2-VL-7B"):
        hpsv3(folder, tmp_path, CPU)
