"""Train the tiny CLIP Score, HPS-v2.1 and PickScore, and save them in their published forms."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import open_clip
import torch
import torch.nn.functional as F
from transformers import CLIPConfig, CLIPImageProcessor, CLIPModel, CLIPTextConfig, CLIPVisionConfig

from g2rpo_core.tasks.task import Scene, Task, held_out
from g2rpo_core.tiny_models.fit import fit
from g2rpo_core.tiny_models.settings import FitSettings, TowerSize
from g2rpo_core.tiny_models.tokenizers import CLIP_LENGTH, clip_tokenizer

HPS_ARCHITECTURE = (
    "tiny-ViT.json"  # a file next to the checkpoint; open_clip knows the published one by name
)
SCENES = 6144  # of a scorer's training at most
PREPROCESS = {  # of `apple/DFN5B-CLIP-ViT-H-14`
    "mean": [0.48145466, 0.4578275, 0.40821073], "std": [0.26862954, 0.26130258, 0.27577711],
    "interpolation": "bicubic", "resize_mode": "squash",
}  # fmt: skip


def architecture(task: Task, size: TowerSize) -> dict[str, Any]:
    """Return the configuration of both towers, as in open_clip's files."""
    return {
        "embed_dim": 64,
        "vision_cfg": {
            "image_size": task.size,
            "layers": size.layers,
            "width": size.width,
            "head_width": 32,
            "patch_size": 8,
        },
        "text_cfg": {
            "context_length": CLIP_LENGTH,
            "vocab_size": 49408,
            "width": 64,
            "heads": 2,
            "layers": 2,
        },
    }


def pairs(
    task: Task, count: int, seed: int, *, testing: bool
) -> tuple[list[str], torch.Tensor, list[str], torch.Tensor]:
    """Draw `count` scenes and a neighbour of each.

    Returns the scenes' captions and images [count, 3, size, size] in [0, 1], then the neighbours'.
    With `testing` the scenes are held-out ones; otherwise neither they nor their neighbours are.
    """
    rng = np.random.default_rng(seed)
    firsts, seconds = list[Scene](), list[Scene]()
    while len(firsts) < count:
        first = task.random_scene(rng)
        second = task.neighbour(first, rng)
        if held_out(first.caption) == testing and (testing or not held_out(second.caption)):
            firsts.append(first)
            seconds.append(second)
    images = [
        torch.from_numpy(np.stack([task.draw(scene, rng) for scene in group]))
        for group in (firsts, seconds)
    ]
    return [s.caption for s in firsts], images[0], [s.caption for s in seconds], images[1]


def degrade(
    task: Task,
    images: torch.Tensor,
    others: torch.Tensor,
    strength: float,
    generator: torch.Generator,
) -> torch.Tensor:
    """Degrade each image [N, 3, H, W] in [0, 1] as an unfinished generator does.

    One of five ways at random: noise, blur, speckles, a faded part, a part that blends into the
    image of `others`. A strength of 1 is plainly visible; every image draws its own share of it,
    from a third upwards.
    """
    n, _, height, width = images.shape
    draw = partial(torch.rand, generator=generator, device=images.device)
    index = partial(torch.randint, generator=generator, device=images.device)
    amount = strength * (1 / 3 + 2 / 3 * draw(n, 1, 1, 1))
    part = amount.clamp(max=1)
    noisy = images + 0.15 * amount * torch.randn(
        images.shape, generator=generator, device=images.device
    )
    blurred = torch.lerp(
        images, F.avg_pool2d(images, 5, stride=1, padding=2, count_include_pad=False), part
    )
    palette = torch.tensor(list(task.colors.values()), device=images.device).float() / 255
    colors = palette[index(len(palette), (n, height, width))].permute(0, 3, 1, 2)
    speckled = torch.where(draw(n, 1, height, width) < 0.06 * amount, colors, images)
    coarse = F.interpolate(draw(n, 1, 4, 4), (height, width), mode="bilinear")
    faded = torch.lerp(
        images, images[:, :, :1, :1].expand_as(images), (coarse > 0.5).float() * 0.7 * part
    )
    blended = torch.lerp(images, others, (4 * coarse - 1.5).clamp(0, 1) * part)
    ways = torch.stack([noisy, blurred, speckled, faded, blended])
    return ways[index(len(ways), (n,)), torch.arange(n, device=images.device)].clamp(0, 1)


class Towers(NamedTuple):
    """A CLIP-like model with a `logit_scale`, and its three calls."""

    model: torch.nn.Module
    tokenize: Callable
    """N texts -> tokens."""
    encode_text: Callable
    """Tokens -> [N, D]."""
    encode_image: Callable
    """Images [N, 3, H, W] -> [N, D]."""


def open_clip_towers(task: Task, size: TowerSize) -> Towers:
    """Make the towers of HPS-v2.1 and CLIP Score."""
    model = open_clip.model.CLIP(**architecture(task, size), output_dict=True)
    tokenize = open_clip.SimpleTokenizer(context_length=CLIP_LENGTH)
    return Towers(model, tokenize, model.encode_text, model.encode_image)


def transformers_towers(task: Task, size: TowerSize) -> Towers:
    """Make the towers of PickScore."""
    tokenizer, whole = clip_tokenizer(), architecture(task, size)
    text, vision = whole["text_cfg"], whole["vision_cfg"]
    widths = lambda tower: {
        "hidden_size": tower["width"],
        "intermediate_size": 4 * tower["width"],
        "num_hidden_layers": tower["layers"],
    }
    shared = {"projection_dim": whole["embed_dim"], "hidden_act": "gelu"}
    text_config = CLIPTextConfig(
        **widths(text),
        **shared,
        num_attention_heads=text["heads"],
        vocab_size=len(tokenizer),
        max_position_embeddings=CLIP_LENGTH,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    heads = vision["width"] // vision["head_width"]
    vision_config = CLIPVisionConfig(
        **widths(vision),
        **shared,
        num_attention_heads=heads,
        image_size=task.size,
        patch_size=vision["patch_size"],
    )
    model = CLIPModel(
        CLIPConfig(
            text_config=text_config, vision_config=vision_config, projection_dim=whole["embed_dim"]
        )
    )
    tokenize = lambda texts: tokenizer(texts, padding=True, return_tensors="pt").input_ids
    encode_text = lambda tokens: model.get_text_features(tokens).pooler_output
    return Towers(
        model, tokenize, encode_text, lambda images: model.get_image_features(images).pooler_output
    )


def train_towers(
    make: Callable[[Task, TowerSize], Towers],
    task: Task,
    settings: FitSettings,
    seed: int,
    scenes: int,
    label: str,
    size: TowerSize,
    device: torch.device,
    *,
    preferences: bool,
) -> tuple[torch.nn.Module, dict]:
    """Train a tiny CLIP by contrastive learning on `scenes` scenes, with hard negatives.

    Every scene is in one batch with a neighbour that differs in one attribute. preferences: add the
    loss of HPS-v2.1 and PickScore: of two images for one caption, the softmax of the scaled cosines
    should choose the right and clean one over the neighbour's, or over a degraded copy. device: to
    train on; the model comes back to the CPU.
    """
    # Model and data
    torch.manual_seed(seed)
    model, tokenize, encode_text, encode_image = make(task, size)
    model.to(device)
    captions, images, other_captions, other_images = pairs(task, scenes, seed, testing=False)
    texts, other_texts = tokenize(captions + other_captions).to(device).chunk(2)
    images, other_images = images.to(device), other_images.to(device)
    generator = torch.Generator(device).manual_seed(seed)
    spoil = partial(degrade, task)
    mean, std = (
        torch.tensor(PREPROCESS[key], device=device).view(3, 1, 1) for key in ("mean", "std")
    )

    def compute_loss(indices):
        # Contrast of all captions and images of the batch, neighbours included
        text = F.normalize(encode_text(torch.cat([texts[indices], other_texts[indices]])), dim=-1)
        clean = torch.cat([images[indices], other_images[indices]])
        image = F.normalize(
            encode_image((spoil(clean, clean.roll(1, 0), 0.4, generator) - mean) / std), dim=-1
        )
        loss = contrastive_loss(model.logit_scale.exp() * image @ text.T)
        if preferences:
            # Preference of the right and clean image over the neighbour's and the degraded one
            count = len(indices)
            spoilt = spoil(clean[:count], clean[count:], 1.0, generator)
            worse = F.normalize(encode_image((spoilt - mean) / std), dim=-1)
            better = F.normalize(encode_image((clean[:count] - mean) / std), dim=-1)
            right, wrong, bad = (
                (features * text[:count]).sum(1) for features in (better, image[count:], worse)
            )
            scale = model.logit_scale.exp()
            loss = loss + F.softplus(scale * (wrong - right)).mean()
            loss = loss + F.softplus(scale * (bad - right)).mean()
        return loss

    loss = fit([model], compute_loss, settings, generator, len(captions), label)
    return model.eval().cpu(), {
        "loss": loss,
        "parameters": sum(p.numel() for p in model.parameters()),
    }


def contrastive_loss(logits: torch.Tensor) -> torch.Tensor:
    """Return CLIP's symmetric cross-entropy of logits [N, N], images x captions."""
    target = torch.arange(len(logits), device=logits.device)
    return (F.cross_entropy(logits, target) + F.cross_entropy(logits.T, target)) / 2


@torch.no_grad()
def scorer_quality(score, task: Task, count: int, seed: int = 10_000) -> dict[str, float]:
    """Measure how often `score(images, prompts) -> [N]` is right on `count` held-out scenes.

    `attribute`: share of captions whose image scores over a neighbour's (ties count half, a missing
    score is lost); `degraded`: over a degraded copy of it. Chance is 0.5 for both.
    """
    captions, images, _, neighbours = pairs(task, count, seed, testing=True)
    right = score(images, captions)
    worse = degrade(task, images, neighbours, 1.0, torch.Generator().manual_seed(seed))
    return {
        name: ((right > other).float() + 0.5 * (right == other).float()).mean().item()
        for name, other in (
            ("attribute", score(neighbours, captions)),
            ("degraded", score(worse, captions)),
        )
    }


def save_clip_score(model: torch.nn.Module, task: Task, size: TowerSize, folder: Path) -> None:
    """Write open_clip's two files, configuration and weights, as in `apple/DFN5B-CLIP-ViT-H-14`."""
    folder.mkdir(parents=True)
    (folder / "open_clip_config.json").write_text(
        json.dumps({"model_cfg": architecture(task, size), "preprocess_cfg": PREPROCESS}, indent=1)
    )
    torch.save(model.state_dict(), folder / "open_clip_pytorch_model.bin")


def save_hps(model: torch.nn.Module, task: Task, size: TowerSize, folder: Path) -> None:
    """Write HPS_v2.1_compressed.pt as in `xswu/HPSv2`, and the architecture beside it.

    open_clip does not know it by a name.
    """
    folder.mkdir(parents=True)
    (folder / HPS_ARCHITECTURE).write_text(json.dumps(architecture(task, size), indent=1))
    torch.save({"state_dict": model.state_dict()}, folder / "HPS_v2.1_compressed.pt")


def save_pickscore_processor(task: Task, folder: Path) -> None:
    """Write the files of `laion/CLIP-ViT-H-14-laion2B-s32B-b79K` that are not weights.

    They are the tokenizer and the preprocessing.
    """
    CLIPImageProcessor(
        size={"shortest_edge": task.size}, crop_size={"height": task.size, "width": task.size}
    ).save_pretrained(folder)
    clip_tokenizer().save_pretrained(folder)
