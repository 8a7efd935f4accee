"""Train the tiny UnifiedReward: a Qwen2.5-VL that answers in the form that a template asks for.

An answer names every attribute that the caption asks for and whether the image holds it, then gives
the score: 5, less 1 for each attribute that is wrong and less 2 for a degraded image, never under
1.
"""

from functools import partial
from typing import Final

import numpy as np
import torch
import torch.nn.functional as F
from transformers import (
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2_5_VLProcessor,
    Qwen2TokenizerFast,
    Qwen2VLImageProcessor,
    Qwen2VLVideoProcessor,
)

from g2rpo_core.rewards.unified_reward import conversation, question, read_template
from g2rpo_core.tasks.task import Scene, Task, held_out
from g2rpo_core.tiny_models.clip import SCENES, degrade
from g2rpo_core.tiny_models.fit import fit
from g2rpo_core.tiny_models.settings import FitSettings
from g2rpo_core.tiny_models.tokenizers import byte_level

TEMPLATE: Final = "final_score.v1"
PATCH = 4  # pixels; four patches make one token of the language model
END = "<|im_end|>"
SPECIAL = [
    "<|im_start|>",
    END,
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
]
CHAT = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% for c in m['content'] %}{% if c['type'] == 'image' %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ c['text'] }}{% endif %}{% endfor "
    "%}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
VALUES = ("0\n", "1\n")  # whether the image holds an element, one token each
# Of weights. With Qwen's 0.02 this model did not learn, which was not traced to this number alone
INIT = 0.1


def answer(task: Task, asked: Scene, shown: Scene, spoilt: bool) -> str:
    """Return the right answer for a caption and an image of scenes with equally many objects."""
    held = [one == other for one, other in zip(task.elements(asked), task.elements(shown))]
    lines = [
        f"{element} ({kind}): {int(value)}"
        for (element, kind), value in zip(task.elements(asked), held)
    ]
    return "\n".join([*lines, f"Final Score: {max(1, 5 - held.count(False) - 2 * spoilt)}"])


def tokenizer(task: Task) -> Qwen2TokenizerFast:
    """Make a byte-level BPE tokenizer in Qwen's form.

    Each word, each element, and the fixed part of the question is one token.
    """
    fixed = [
        read_template(TEMPLATE).partition("{prompt}")[0],
        "Final Score: ",
        "assistant\n",
        "user\n",
        *VALUES,
    ]
    fixed += [f" {phrase}" for phrase in list(task.kinds.values())[-1]]
    fixed += [f"{element} ({kind}): " for kind, words in task.kinds.items() for element in words]
    made = byte_level(task.phrases, SPECIAL, fixed)
    made.pad_token = made.eos_token = END
    made.padding_side = "left"
    return made


def processor(task: Task) -> Qwen2_5_VLProcessor:
    """Make the processor and chat template; 32 x 32 pixels are 16 tokens."""
    pixels = task.size**2
    images = {"patch_size": PATCH, "size": {"shortest_edge": pixels, "longest_edge": pixels}}
    return Qwen2_5_VLProcessor(
        image_processor=Qwen2VLImageProcessor(**images),
        video_processor=Qwen2VLVideoProcessor(**images),
        tokenizer=tokenizer(task),
        chat_template=CHAT,
    )


def ids_and_text(words: Qwen2TokenizerFast) -> tuple[dict[str, int], dict[str, object]]:
    """Return the special tokens' ids, and the language model's part of a configuration."""
    ids = dict(
        zip(
            ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id"),
            words.convert_tokens_to_ids(
                ["<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"]
            ),
        )
    )
    end = {
        name: words.convert_tokens_to_ids(END)
        for name in ("bos_token_id", "eos_token_id", "pad_token_id")
    }
    text = {
        "vocab_size": len(words),
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "max_position_embeddings": 2048,
        "initializer_range": INIT,
        "rope_parameters": {
            "rope_type": "default",
            "mrope_section": [4, 6, 6],
            "rope_theta": 10_000.0,
        },
    } | end
    return ids | end, text


def model(task: Task, words: Qwen2TokenizerFast) -> Qwen2_5_VLForConditionalGeneration:
    """Make the vision-language model with random weights, for the ids of a tokenizer."""
    ids, text = ids_and_text(words)
    text |= {"tie_word_embeddings": False}
    vision = {
        "depth": 2,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_heads": 2,
        "out_hidden_size": 64,
        "patch_size": PATCH,
        "window_size": task.size,
        "initializer_range": INIT,
        "fullatt_block_indexes": [0, 1],
    }
    return Qwen2_5_VLForConditionalGeneration(
        Qwen2_5_VLConfig(text_config=text, vision_config=vision, **ids)
    )


def train_vlm(
    task: Task, settings: FitSettings, seed: int, count: int
) -> tuple[Qwen2_5_VLForConditionalGeneration, Qwen2_5_VLProcessor, dict]:
    """Train on right captions, captions with one or several wrong attributes, and degraded images.

    Where the caption is right, its own words are learned too, from the image before them: this
    teaches the model to see.
    """
    # Model and scenes
    torch.manual_seed(seed)
    inputs_of = processor(task)
    words = inputs_of.tokenizer
    vlm = model(task, words)
    rng, generator = np.random.default_rng(seed), torch.Generator().manual_seed(seed)
    # From as many whatever the count: of few, all may be held out
    scenes = [
        scene
        for scene in (task.random_scene(rng) for _ in range(2 * SCENES))
        if not held_out(scene.caption)
    ][:count]
    drawn = torch.from_numpy(np.stack([task.draw(scene, rng) for scene in scenes]))
    # the tokens before an answer, and before a caption
    reply, caption = words.convert_tokens_to_ids(
        ["assistant\n", read_template(TEMPLATE).partition("{prompt}")[0]]
    )
    judged = torch.tensor(words.convert_tokens_to_ids([*VALUES, *"12345"]))

    def compute_loss(indices):
        # Captions, images and their right answers
        shown = [scenes[index] for index in indices]
        asked = [change(task, scene, int(rng.choice([0, 0, 1, 1, 3])), rng) for scene in shown]
        images, spoilt = drawn[indices], torch.from_numpy(rng.random(len(indices)) < 0.3)
        bad = degrade(task, images, images.roll(1, 0), 1.0, generator)
        images = torch.where(spoilt[:, None, None, None], bad, images)
        chat = partial(inputs_of.apply_chat_template, add_generation_prompt=True, tokenize=False)
        texts = [
            chat(conversation(question(TEMPLATE, a.caption))) + answer(task, a, s, bool(b)) + END
            for a, s, b in zip(asked, shown, spoilt)
        ]
        pixels = list((images * 255).round().byte())
        inputs = inputs_of(text=texts, images=pixels, padding=True, return_tensors="pt")
        # Cross-entropy of the answer, of its judgements, and of right captions
        logits, ids = vlm(**inputs).logits[:, :-1], inputs["input_ids"]
        target = ids[:, 1:]
        losses = F.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="none")
        losses = losses.view_as(target)
        mean = lambda where: (losses * where).sum() / where.sum().clamp(min=1)
        after = lambda token: (ids == token).cumsum(1)[:, :-1] > 0
        right = torch.tensor([a == s for a, s in zip(asked, shown)])[:, None]
        answered = after(reply) & (inputs["attention_mask"][:, 1:] > 0)
        chosen = answered & torch.isin(target, judged)  # the rest of an answer repeats the caption
        return mean(answered) + mean(chosen) + mean(after(caption) & ~after(reply) & right)

    loss = fit([vlm], compute_loss, settings, generator, len(scenes), "unified reward")
    about = {"loss": loss, "parameters": sum(p.numel() for p in vlm.parameters())}
    return vlm.eval(), inputs_of, about


def change(task: Task, scene: Scene, changes: int, rng: np.random.Generator) -> Scene:
    """Return `scene` after that many changes of one attribute, never a held-out scene."""
    changed = scene
    for _ in range(changes):
        changed = task.neighbour(changed, rng)
    return change(task, scene, changes, rng) if held_out(changed.caption) else changed
