"""HPSv3 against the published package's own model and words, and the teaching of the tiny one."""

import ast
import importlib.metadata
import importlib.util
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torchvision.transforms.v2 import functional as TF
from transformers import (
    Qwen2VLConfig,
    Qwen2VLImageProcessor,
    Qwen2VLProcessor,
    Qwen2VLVideoProcessor,
)

from g2rpo_core.foundation.errors import UserError
from g2rpo_core.rewards import packages
from g2rpo_core.rewards import registry as rewards
from g2rpo_core.rewards.hpsv3 import TEMPLATE, TOKEN, HPSv3Settings, hpsv3, read_processor
from g2rpo_core.rewards.unified_reward import conversation, question
from g2rpo_core.tasks.table import TASKS
from g2rpo_core.tiny_models.build import build_scorer
from g2rpo_core.tiny_models.hpsv3 import config_of, tokenizer
from g2rpo_core.tiny_models.settings import BuiltModels, FitSettings
from g2rpo_core.tiny_models.unified_reward import CHAT
from tests.fixtures.images import IMAGES, PROMPTS, SEEN

CPU = torch.device("cpu")
SHAPES = TASKS["shapes"]
TINY = {"hpsv3": {"pixels": 32 * 32}}


def package_file(name: str) -> Path:
    return Path(str(importlib.metadata.distribution("hpsv3").locate_file("hpsv3"))) / name


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """The package's model on a small Qwen2-VL with patches of the real size, and its files."""
    base, folder = tmp_path_factory.mktemp("base"), tmp_path_factory.mktemp("hpsv3")
    words = tokenizer(SHAPES)
    made = Qwen2VLProcessor(
        image_processor=Qwen2VLImageProcessor(),
        video_processor=Qwen2VLVideoProcessor(),
        tokenizer=words,
        chat_template=CHAT,
    )
    made.save_pretrained(base)
    config = config_of(words)
    config.vision_config.patch_size = config.vision_config.spatial_patch_size = 14
    config.save_pretrained(base)
    _, token = read_processor(base)
    config = Qwen2VLConfig.from_pretrained(base)
    config.text_config.vocab_size = token + 1
    torch.manual_seed(0)
    model = packages.hpsv3_model(config, token)
    with torch.no_grad():  # far from those of a start, so that every layer matters
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    save_file(
        {name: value.contiguous() for name, value in model.state_dict().items()},
        folder / "HPSv3.safetensors",
    )
    return model, folder, base


@torch.no_grad()
def their_scores(model, base: Path) -> torch.Tensor:
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
    model, folder, base = published
    theirs = their_scores(model, base)
    ours = hpsv3(folder, base, CPU, HPSv3Settings(micro_batch=3))(list(IMAGES.values()), PROMPTS)
    assert ours.dtype == torch.float32 and theirs.std() > 0.01
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    another = hpsv3(folder, base, CPU)([IMAGES["square"]] * 8, PROMPTS)
    assert (another - ours).abs().max() > 1e-3  # the image matters as the prompt does


def test_the_instruction_is_the_published_one_word_for_word():
    tree = ast.parse(package_file("dataset/data_collator_qwen.py").read_text(encoding="utf-8"))
    texts = {
        part.targets[0].id: part.value.value
        for part in tree.body
        if isinstance(part, ast.Assign) and isinstance(part.value, ast.Constant)
    }
    theirs = (
        texts["INSTRUCTION"].format(text_prompt="a {red} circle")
        + texts["prompt_with_special_token"]
    )
    assert question(TEMPLATE, "a {red} circle") == theirs and theirs.count(TOKEN) == 1


def test_a_score_does_not_depend_on_what_else_is_in_the_call(models):
    images, prompts = list(IMAGES.values()), [*PROMPTS[:7], PROMPTS[7] * 3]
    alone, together = ({"hpsv3": {**TINY["hpsv3"], "micro_batch": count}} for count in (1, 8))
    first, second = (
        rewards.load(["hpsv3"], models, section=section)["hpsv3"](images, prompts)
        for section in (alone, together)
    )
    torch.testing.assert_close(first, second, rtol=1e-5, atol=1e-5)
    assert first.std() > 1e-4


def test_tensors_and_files_of_8_bits_have_one_score(models):
    reward = rewards.load(["hpsv3"], models, section=TINY)["hpsv3"]
    file = IMAGES["square"]
    tensor = TF.to_dtype(TF.pil_to_tensor(file), torch.float32, scale=True)[None]
    assert torch.equal(reward([file], PROMPTS[:1]), reward(tensor, PROMPTS[:1]))
    with pytest.raises(ValueError, match="1 images and 2 prompts"):
        reward([file], PROMPTS[:2])


def test_the_trunk_has_the_dtype_asked_for_and_the_head_float32(models):
    reward = rewards.load(
        ["hpsv3"], models, section={"hpsv3": {**TINY["hpsv3"], "dtype": "bfloat16"}}
    )["hpsv3"]
    assert (
        reward.model.trunk.dtype == torch.bfloat16
        and reward.model.head[0].weight.dtype == torch.float32
    )
    exact = rewards.load(["hpsv3"], models, section=TINY)["hpsv3"]
    images = list(IMAGES.values())
    assert exact.model.trunk.dtype == torch.float32  # as the files have it
    assert 0 < (reward(images, PROMPTS) - exact(images, PROMPTS)).abs().max() < 0.1


def test_files_that_do_not_fit_are_refused_in_one_line(models, tmp_path):
    weights = load_file(models / "hpsv3" / "HPSv3.safetensors")
    base, broken = models / "hpsv3_processor", tmp_path / "HPSv3.safetensors"
    save_file(
        {
            name: value
            for name, value in weights.items()
            if name != "model.layers.0.mlp.up_proj.weight"
        },
        broken,
    )
    with pytest.raises(UserError, match="not the weights of HPSv3: .*layers.0.mlp.up_proj.weight"):
        hpsv3(tmp_path, base, CPU)
    save_file(
        {name: value for name, value in weights.items() if not name.startswith("rm_head.0")}, broken
    )
    with pytest.raises(UserError, match="0.weight"):
        hpsv3(tmp_path, base, CPU)
    name = "model.embed_tokens.weight"
    save_file(weights | {name: torch.cat([weights[name], weights[name][:1]])}, broken)
    with pytest.raises(
        UserError, match=r"<\|Reward\|> has the id \d+, but the weights have \d+ tokens"
    ):
        hpsv3(tmp_path, base, CPU)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "clip"}))
    with pytest.raises(
        UserError,
        match="is a model of type 'clip', but HPSv3 is a qwen2_vl: take Qwen/Qwen2-VL-7B-Instruct",
    ):
        hpsv3(models / "hpsv3", tmp_path, CPU)


@pytest.mark.slow
@pytest.mark.engines
def test_a_short_training_prefers_right_images_of_scenes_it_never_saw(tmp_path):
    """Chance is 0.5; one deviation of 512 scenes is 0.022."""
    how = FitSettings(steps=300, batch=32, learning_rate=3e-3)
    once = FitSettings(steps=1, batch=1, learning_rate=1e-3)
    built = BuiltModels(source="shapes", seed=0, images=8, vae=once, flux=once, hpsv3=how)
    quality = build_scorer(tmp_path, built, "hpsv3")["hpsv3"]
    assert quality["attribute"] > 0.6 and quality["degraded"] > 0.8
