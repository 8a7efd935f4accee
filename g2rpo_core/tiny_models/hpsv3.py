"""Train the tiny HPSv3, a Qwen2-VL that ranks images, and save it in the published form."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Final

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from transformers import (
    Qwen2TokenizerFast,
    Qwen2VLConfig,
    Qwen2VLImageProcessor,
    Qwen2VLModel,
    Qwen2VLProcessor,
    Qwen2VLVideoProcessor,
)

from g2rpo_core.rewards.hpsv3 import TEMPLATE, TOKEN, HPSv3Model, HPSv3Settings, encode, hpsv3
from g2rpo_core.rewards.unified_reward import read_template
from g2rpo_core.tasks.task import Task
from g2rpo_core.tiny_models.clip import degrade, pairs
from g2rpo_core.tiny_models.fit import fit
from g2rpo_core.tiny_models.settings import FitSettings
from g2rpo_core.tiny_models.tokenizers import byte_level
from g2rpo_core.tiny_models.unified_reward import CHAT, END, INIT, PATCH, SPECIAL, ids_and_text

if TYPE_CHECKING:  # it imports this module
    from g2rpo_core.tiny_models.build import Scorer

SCENES: Final = 6144
PUBLISHED = [
    (r"^trunk\.visual\.", "visual."),
    (r"^trunk\.language_model\.", "model."),
    (r"^head\.", "rm_head."),
]


def tokenizer(task: Task) -> Qwen2TokenizerFast:
    """Make a byte-level BPE tokenizer in Qwen's form, without TOKEN.

    Each word, and each fixed part of the instruction, is one token.
    """
    before, after = read_template(TEMPLATE).split("{prompt}")
    made = byte_level(task.phrases, SPECIAL, [before, *after.split(TOKEN), "assistant\n", "user\n"])
    made.pad_token = made.eos_token = END
    return made


def processor(task: Task) -> Qwen2VLProcessor:
    """Make the base model's processor and chat template; 32 x 32 pixels are 16 tokens."""
    pixels = task.size**2
    images = {"patch_size": PATCH, "size": {"shortest_edge": pixels, "longest_edge": pixels}}
    return Qwen2VLProcessor(
        image_processor=Qwen2VLImageProcessor(**images),
        video_processor=Qwen2VLVideoProcessor(**images),
        tokenizer=tokenizer(task),
        chat_template=CHAT,
    )


def config_of(words: Qwen2TokenizerFast) -> Qwen2VLConfig:
    """Return the base model's configuration for a tokenizer that has no TOKEN yet."""
    ids, text = ids_and_text(words)
    vision = {
        "depth": 2,
        "embed_dim": 64,
        "hidden_size": 64,
        "mlp_ratio": 2,
        "num_heads": 2,
        "patch_size": PATCH,
        "spatial_patch_size": PATCH,
        "initializer_range": INIT,
    }
    return Qwen2VLConfig(text_config=text, vision_config=vision, **ids)


def train_hpsv3(task: Task, settings: FitSettings, seed: int) -> tuple[HPSv3Model, dict]:
    """Train on preferences for the right and clean one of two images for a caption.

    The other one is a neighbour's, or a degraded copy. The published model also learns a deviation;
    here the head's second output stays untrained, as no reward reads it. The words of the caption
    are learned too, from the right image before them: this teaches the model to see.
    """
    # Model and tokenizer, with the token that the head reads
    torch.manual_seed(seed)
    inputs_of = processor(task)
    words = inputs_of.tokenizer
    config = config_of(words)
    words.add_tokens([TOKEN], special_tokens=True)
    words.padding_side = "right"
    config.text_config.vocab_size = len(words)
    model = HPSv3Model(Qwen2VLModel(config), words.convert_tokens_to_ids(TOKEN))
    before, after = read_template(TEMPLATE).split("{prompt}")
    start, end = words.convert_tokens_to_ids([before, after.split(TOKEN)[0]])
    # Data: pairs of a scene and its neighbour
    captions, images, _, other_images = pairs(task, SCENES, seed, testing=False)
    generator = torch.Generator().manual_seed(seed)
    states: list[torch.Tensor] = []
    model.trunk.language_model.register_forward_hook(
        lambda *call: states.append(call[2].last_hidden_state)
    )

    def compute_loss(indices):
        clean, others = images[indices], other_images[indices]
        near = degrade(task, torch.cat([clean, others]), torch.cat([others, clean]), 0.4, generator)
        # Right images, neighbours', degraded ones
        seen = torch.cat([near, degrade(task, clean, others, 1.0, generator)])
        asked = [captions[index] for index in indices] * 3
        inputs = encode(inputs_of, seen, asked, task.size**2)
        states.clear()
        scores = model(
            inputs["input_ids"],
            inputs["attention_mask"],
            inputs["pixel_values"],
            inputs["image_grid_thw"],
        )[:, 0]
        right, wrong, bad = scores.split(len(indices))
        # The caption's words, by their embeddings
        ids = inputs["input_ids"][: len(indices)]
        logits = states[0][: len(indices), :-1] @ model.trunk.language_model.embed_tokens.weight.T
        inside = ((ids == start).cumsum(1) - (ids == end).cumsum(1))[:, :-1] > 0
        read = F.cross_entropy(logits[inside], ids[:, 1:][inside])
        return read + F.softplus(wrong - right).mean() + F.softplus(bad - right).mean()

    loss = fit([model], compute_loss, settings, generator, len(captions), "hpsv3")
    model.trunk.language_model._forward_hooks.clear()
    return model.eval(), {"loss": loss, "parameters": sum(p.numel() for p in model.parameters())}


def save_hpsv3(model: HPSv3Model, task: Task, folder: Path, base: Path) -> None:
    """Write HPSv3.safetensors as in `MizzenAI/HPSv3`, and the base model's config and processor.

    The base model's weights are not written: the reward needs none.
    """
    folder.mkdir(parents=True)
    weights = {}
    for name, value in model.state_dict().items():
        for pattern, replacement in PUBLISHED:
            name = re.sub(pattern, replacement, name)
        weights[name] = value.contiguous()
    weights["lm_head.weight"] = torch.zeros_like(weights["model.embed_tokens.weight"])
    save_file(weights, folder / "HPSv3.safetensors")
    made = processor(task)
    made.save_pretrained(base)
    config_of(made.tokenizer).save_pretrained(base)


def build(root: Path, how: "Scorer") -> tuple[Callable, dict]:
    """Train and save it; return the reward that reads its files, and its quality."""
    model, quality = train_hpsv3(*how[:3])
    save_hpsv3(model, how.task, root / "hpsv3", root / "hpsv3_processor")
    small = HPSv3Settings(pixels=how.task.size**2, micro_batch=128)
    cpu = torch.device("cpu")
    return hpsv3(root / "hpsv3", root / "hpsv3_processor", cpu, small), quality
