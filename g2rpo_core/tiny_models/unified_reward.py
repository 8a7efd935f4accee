"""The tiny UnifiedReward: a Qwen2.5-VL that is taught here to judge a world's pictures in the words of a template.

An answer names every attribute that the caption asks for and whether the image holds it, then gives the score: 5, less 1
for each attribute that is wrong and less 2 for a spoilt image, never under 1.
"""

import json
from pathlib import Path
from typing import Final

import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import AddedToken, ByteLevelBPETokenizer
from transformers import (
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2_5_VLProcessor,
    Qwen2TokenizerFast,
    Qwen2VLImageProcessor,
    Qwen2VLVideoProcessor,
)

from g2rpo_core.rewards.templates import question, text_of
from g2rpo_core.rewards.unified_reward import conversation
from g2rpo_core.tiny_models.clip import degrade
from g2rpo_core.tiny_models.fit import fit
from g2rpo_core.tiny_models.settings import FitSettings
from g2rpo_core.worlds.world import Scene, World, held_out

TEMPLATE: Final = "final_score.v1"
PATCH = 4  # pixels; four patches make one token of the language model: 16 an image
END = "<|im_end|>"
SPECIAL = ["<|im_start|>", END, "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
CHAT = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% for c in m['content'] %}{% if c['type'] == 'image' %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ c['text'] }}{% endif %}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SCENES = 6144
VALUES = ("0\n", "1\n")  # whether the image holds an element, one token each
INIT = 0.1  # of weights; with Qwen's 0.02 this model stayed unlearned, which was not traced to this number alone


def answer(world: World, asked: Scene, shown: Scene, spoilt: bool) -> str:
    """The right answer for a caption and an image of scenes with equally many objects."""
    held = [one == other for one, other in zip(world.elements(asked), world.elements(shown))]
    lines = [f"{element} ({kind}): {int(value)}" for (element, kind), value in zip(world.elements(asked), held)]
    return "\n".join([*lines, f"Final Score: {max(1, 5 - held.count(False) - 2 * spoilt)}"])


def tokenizer(world: World) -> Qwen2TokenizerFast:
    """A byte-level BPE tokenizer in Qwen's form: one token for each word, each element, and the fixed part of the question."""
    trained = ByteLevelBPETokenizer()
    trained.train_from_iterator(
        [f"{word} {word}" for word in world.phrases] * 8, vocab_size=1000, min_frequency=2, show_progress=False
    )
    vocabulary, merges = model_of(trained)
    made = Qwen2TokenizerFast(vocab=vocabulary, merges=merges)
    made.add_special_tokens({"additional_special_tokens": SPECIAL})
    fixed = [text_of(TEMPLATE).partition("{prompt}")[0], "Final Score: ", "assistant\n", "user\n", *VALUES]
    fixed += [f" {phrase}" for phrase in list(world.kinds.values())[-1]]
    fixed += [f"{element} ({kind}): " for kind, found in world.kinds.items() for element in found]
    made.add_tokens([AddedToken(text, normalized=False) for text in fixed])
    made.pad_token = made.eos_token = END
    made.padding_side = "left"
    return made


def model_of(trained: ByteLevelBPETokenizer) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Vocabulary and merges of a trained tokenizer."""
    model = json.loads(trained.to_str())["model"]
    return model["vocab"], [tuple(merge) for merge in model["merges"]]


def processor(world: World) -> Qwen2_5_VLProcessor:
    pixels = world.size**2
    images = {"patch_size": PATCH, "size": {"shortest_edge": pixels, "longest_edge": pixels}}
    return Qwen2_5_VLProcessor(
        image_processor=Qwen2VLImageProcessor(**images),
        video_processor=Qwen2VLVideoProcessor(**images),
        tokenizer=tokenizer(world),
        chat_template=CHAT,
    )


def model(world: World, words: Qwen2TokenizerFast) -> Qwen2_5_VLForConditionalGeneration:
    ids = dict(zip(("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id"),
                   words.convert_tokens_to_ids(["<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"])))  # fmt: skip
    end = {name: words.convert_tokens_to_ids(END) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    text = {
        "vocab_size": len(words), "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 2,
        "num_key_value_heads": 2, "max_position_embeddings": 2048, "tie_word_embeddings": False, "initializer_range": INIT,
        "rope_parameters": {"rope_type": "default", "mrope_section": [4, 6, 6], "rope_theta": 10_000.0},
    } | end  # fmt: skip
    vision = {
        "depth": 2, "hidden_size": 64, "intermediate_size": 128, "num_heads": 2, "out_hidden_size": 64, "patch_size": PATCH,
        "window_size": world.size, "initializer_range": INIT, "fullatt_block_indexes": [0, 1],
    }  # fmt: skip
    return Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig(text_config=text, vision_config=vision, **ids, **end))


def train_vlm(world: World, how: FitSettings, seed: int) -> tuple[Qwen2_5_VLForConditionalGeneration, Qwen2_5_VLProcessor, dict]:
    """Supervised answers for right captions, captions with one and with several wrong attributes, and spoilt images.

    Where the caption is right its own words are learned too, from the image before them: that is how it comes to see.
    """
    torch.manual_seed(seed)
    inputs_of = processor(world)
    words = inputs_of.tokenizer
    vlm = model(world, words)
    rng, generator = np.random.default_rng(seed), torch.Generator().manual_seed(seed)
    scenes = [scene for scene in (world.random_scene(rng) for _ in range(2 * SCENES)) if not held_out(scene.caption)][:SCENES]
    drawn = torch.from_numpy(np.stack([world.draw(scene, rng) for scene in scenes]))
    reply, caption = words.convert_tokens_to_ids(
        ["assistant\n", text_of(TEMPLATE).partition("{prompt}")[0]]
    )  # what stands before
    judged = torch.tensor(words.convert_tokens_to_ids([*VALUES, *"12345"]))

    def loss_of(indices):
        shown = [scenes[index] for index in indices]
        asked = [other(world, scene, int(rng.choice([0, 0, 1, 1, 3])), rng) for scene in shown]
        images, spoilt = drawn[indices], torch.from_numpy(rng.random(len(indices)) < 0.3)
        bad = degrade(world, images, images.roll(1, 0), 1.0, generator)
        images = torch.where(spoilt[:, None, None, None], bad, images)
        texts = [
            inputs_of.apply_chat_template(conversation(question(TEMPLATE, a.caption)), add_generation_prompt=True, tokenize=False)
            + answer(world, a, s, bool(b)) + END
            for a, s, b in zip(asked, shown, spoilt)
        ]  # fmt: skip
        inputs = inputs_of(text=texts, images=list((images * 255).round().byte()), padding=True, return_tensors="pt")
        logits, ids = vlm(**inputs).logits[:, :-1], inputs["input_ids"]
        target = ids[:, 1:]
        losses = F.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="none").view_as(target)
        mean = lambda where: (losses * where).sum() / where.sum().clamp(min=1)
        after = lambda token: (ids == token).cumsum(1)[:, :-1] > 0
        right = torch.tensor([a == s for a, s in zip(asked, shown)])[:, None]
        answered = after(reply) & (inputs["attention_mask"][:, 1:] > 0)
        chosen = answered & torch.isin(target, judged)  # the rest of an answer repeats the caption
        return mean(answered) + mean(chosen) + mean(after(caption) & ~after(reply) & right)

    loss = fit([vlm], loss_of, how, generator, len(scenes), "unified reward")
    return vlm.eval(), inputs_of, {"loss": loss, "parameters": sum(p.numel() for p in vlm.parameters())}


def other(world: World, scene: Scene, changes: int, rng: np.random.Generator) -> Scene:
    """`scene` with so many changes of one attribute, none held out."""
    changed = scene
    for _ in range(changes):
        changed = world.neighbour(changed, rng)
    return other(world, scene, changes, rng) if held_out(changed.caption) else changed


def save_vlm(vlm: Qwen2_5_VLForConditionalGeneration, inputs_of: Qwen2_5_VLProcessor, folder: Path) -> None:
    """The files of `CodeGoat24/UnifiedReward-qwen-7b`: a transformers folder with its processor."""
    vlm.save_pretrained(folder)
    inputs_of.save_pretrained(folder)
