"""The tiny CLIP Score, HPS-v2.1 and PickScore: models of two towers trained here on a world's pictures, saved in their published forms."""

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

from g2rpo_core.tiny_models.fit import fit
from g2rpo_core.tiny_models.settings import FitSettings
from g2rpo_core.tiny_models.tokenizers import CLIP_LENGTH, clip_tokenizer
from g2rpo_core.worlds.world import Scene, World, held_out

HPS_ARCHITECTURE = "tiny-ViT.json"  # beside the checkpoint; for the published one, open_clip knows the name
PREPROCESS = {  # of `apple/DFN5B-CLIP-ViT-H-14`
    "mean": [0.48145466, 0.4578275, 0.40821073], "std": [0.26862954, 0.26130258, 0.27577711],
    "interpolation": "bicubic", "resize_mode": "squash",
}  # fmt: skip


def architecture(world: World) -> dict[str, Any]:
    """That of both towers, as in open_clip's files."""
    return {
        "embed_dim": 64,
        "vision_cfg": {"image_size": world.size, "layers": 3, "width": 96, "head_width": 32, "patch_size": 8},
        "text_cfg": {"context_length": CLIP_LENGTH, "vocab_size": 49408, "width": 64, "heads": 2, "layers": 2},
    }


def pairs(world: World, count: int, seed: int, *, testing: bool) -> tuple[list[str], torch.Tensor, list[str], torch.Tensor]:
    """`count` scenes and a neighbour of each: captions and images [count, 3, size, size] in [0, 1], both twice.

    The first scenes are held-out ones if `testing`; otherwise neither they nor their neighbours are.
    """
    rng = np.random.default_rng(seed)
    firsts: list[Scene] = []
    seconds: list[Scene] = []
    while len(firsts) < count:
        first = world.random_scene(rng)
        second = world.neighbour(first, rng)
        if held_out(first.caption) == testing and (testing or not held_out(second.caption)):
            firsts.append(first)
            seconds.append(second)
    images = [torch.from_numpy(np.stack([world.draw(scene, rng) for scene in group])) for group in (firsts, seconds)]
    return [s.caption for s in firsts], images[0], [s.caption for s in seconds], images[1]


def degrade(
    world: World, images: torch.Tensor, others: torch.Tensor, strength: float, generator: torch.Generator
) -> torch.Tensor:
    """Each image [N, 3, H, W] in [0, 1] spoilt in one of five ways, at random: noise, blur, speckles, a faded part, or a part
    that blends into its image of `others`, which is what an unfinished generator does.

    strength: 1 is plainly visible; every image draws its own share of it, from a third upwards.
    """
    n, _, height, width = images.shape
    amount = strength * (1 / 3 + 2 / 3 * torch.rand(n, 1, 1, 1, generator=generator))
    part = amount.clamp(max=1)
    noisy = images + 0.15 * amount * torch.randn(images.shape, generator=generator)
    blurred = torch.lerp(images, F.avg_pool2d(images, 5, stride=1, padding=2, count_include_pad=False), part)
    palette = torch.tensor(list(world.colors.values())).float() / 255
    colors = palette[torch.randint(len(palette), (n, height, width), generator=generator)].permute(0, 3, 1, 2)
    speckled = torch.where(torch.rand(n, 1, height, width, generator=generator) < 0.06 * amount, colors, images)
    coarse = F.interpolate(torch.rand(n, 1, 4, 4, generator=generator), (height, width), mode="bilinear")
    faded = torch.lerp(images, images[:, :, :1, :1].expand_as(images), (coarse > 0.5).float() * 0.7 * part)
    blended = torch.lerp(images, others, (4 * coarse - 1.5).clamp(0, 1) * part)
    ways = torch.stack([noisy, blurred, speckled, faded, blended])
    return ways[torch.randint(len(ways), (n,), generator=generator), torch.arange(n)].clamp(0, 1)


class Towers(NamedTuple):
    """A model with a `logit_scale`; tokenize(texts) -> tokens, encode_text(tokens) and encode_image(images) -> [n, D]."""

    model: torch.nn.Module
    tokenize: Callable
    encode_text: Callable
    encode_image: Callable


def open_clip_towers(world: World) -> Towers:
    """For HPS-v2.1 and CLIP Score."""
    model = open_clip.model.CLIP(**architecture(world), output_dict=True)
    tokenize = open_clip.SimpleTokenizer(context_length=CLIP_LENGTH)
    return Towers(model, tokenize, model.encode_text, model.encode_image)


def transformers_towers(world: World) -> Towers:
    """For PickScore."""
    tokenizer, whole = clip_tokenizer(), architecture(world)
    text, vision = whole["text_cfg"], whole["vision_cfg"]
    sizes = lambda tower: {
        "hidden_size": tower["width"],
        "intermediate_size": 4 * tower["width"],
        "num_hidden_layers": tower["layers"],
    }
    shared = {"projection_dim": whole["embed_dim"], "hidden_act": "gelu"}
    text_config = CLIPTextConfig(
        **sizes(text), **shared, num_attention_heads=text["heads"], vocab_size=len(tokenizer), max_position_embeddings=CLIP_LENGTH,
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    heads = vision["width"] // vision["head_width"]
    vision_config = CLIPVisionConfig(
        **sizes(vision), **shared, num_attention_heads=heads, image_size=world.size, patch_size=vision["patch_size"]
    )
    model = CLIPModel(CLIPConfig(text_config=text_config, vision_config=vision_config, projection_dim=whole["embed_dim"]))
    tokenize = lambda texts: tokenizer(texts, padding=True, return_tensors="pt").input_ids
    encode_text = lambda tokens: model.get_text_features(tokens).pooler_output
    return Towers(model, tokenize, encode_text, lambda images: model.get_image_features(images).pooler_output)


def train_towers(
    make: Callable[[World], Towers], world: World, how: FitSettings, seed: int, label: str, *, preferences: bool
) -> tuple[torch.nn.Module, dict]:
    """A tiny CLIP by contrastive learning, every scene beside a neighbour that differs in one attribute.

    preferences: train for HPS-v2.1 and PickScore as well, with their loss: of two images for one caption, the softmax of the
    scaled cosines should choose the right and clean one over that of the neighbour, or over a degraded copy.
    """
    torch.manual_seed(seed)
    model, tokenize, encode_text, encode_image = make(world)
    captions, images, other_captions, other_images = pairs(world, 6144, seed, testing=False)
    texts, other_texts = tokenize(captions + other_captions).chunk(2)
    generator = torch.Generator().manual_seed(seed)
    spoil = partial(degrade, world)
    mean, std = (torch.tensor(PREPROCESS[key]).view(3, 1, 1) for key in ("mean", "std"))

    def loss_of(indices):
        text = F.normalize(encode_text(torch.cat([texts[indices], other_texts[indices]])), dim=-1)
        clean = torch.cat([images[indices], other_images[indices]])
        image = F.normalize(encode_image((spoil(clean, clean.roll(1, 0), 0.4, generator) - mean) / std), dim=-1)
        logits = model.logit_scale.exp() * image @ text.T
        target = torch.arange(len(logits))
        loss = (F.cross_entropy(logits, target) + F.cross_entropy(logits.T, target)) / 2
        if preferences:
            count = len(indices)
            spoilt = spoil(clean[:count], clean[count:], 1.0, generator)
            worse = F.normalize(encode_image((spoilt - mean) / std), dim=-1)
            better = F.normalize(encode_image((clean[:count] - mean) / std), dim=-1)
            right, wrong, bad = ((features * text[:count]).sum(1) for features in (better, image[count:], worse))
            scale = model.logit_scale.exp()
            loss = loss + F.softplus(scale * (wrong - right)).mean() + F.softplus(scale * (bad - right)).mean()
        return loss

    loss = fit([model], loss_of, how, generator, len(captions), label)
    return model.eval(), {"loss": loss, "parameters": sum(p.numel() for p in model.parameters())}


@torch.no_grad()
def scorer_quality(score, world: World, seed: int = 10_000, count: int = 512) -> dict[str, float]:
    """How often a scorer `score(images, prompts) -> [N]` is right on held-out scenes; chance is 0.5 for both.

    `attribute`: share of captions whose image scores over that of a neighbour (ties count half, a missing score is lost);
    `degraded`: over a degraded copy of it.
    """
    captions, images, _, neighbours = pairs(world, count, seed, testing=True)
    right = score(images, captions)
    worse = degrade(world, images, neighbours, 1.0, torch.Generator().manual_seed(seed))
    return {
        name: ((right > other).float() + 0.5 * (right == other).float()).mean().item()
        for name, other in (("attribute", score(neighbours, captions)), ("degraded", score(worse, captions)))
    }


def save_clip_score(model: torch.nn.Module, world: World, folder: Path) -> None:
    """The files of `apple/DFN5B-CLIP-ViT-H-14`: open_clip_config.json and open_clip_pytorch_model.bin."""
    folder.mkdir(parents=True)
    (folder / "open_clip_config.json").write_text(
        json.dumps({"model_cfg": architecture(world), "preprocess_cfg": PREPROCESS}, indent=1)
    )
    torch.save(model.state_dict(), folder / "open_clip_pytorch_model.bin")


def save_hps(model: torch.nn.Module, world: World, folder: Path) -> None:
    """The file of `xswu/HPSv2`, HPS_v2.1_compressed.pt, and the architecture that open_clip cannot know by name."""
    folder.mkdir(parents=True)
    (folder / HPS_ARCHITECTURE).write_text(json.dumps(architecture(world), indent=1))
    torch.save({"state_dict": model.state_dict()}, folder / "HPS_v2.1_compressed.pt")


def save_pickscore(model: CLIPModel, folder: Path) -> None:
    """The files of `yuvalkirstain/PickScore_v1`."""
    model.save_pretrained(folder)


def save_pickscore_processor(world: World, folder: Path) -> None:
    """The files of `laion/CLIP-ViT-H-14-laion2B-s32B-b79K` that are not weights: tokenizer and preprocessing."""
    CLIPImageProcessor(size={"shortest_edge": world.size}, crop_size={"height": world.size, "width": world.size}).save_pretrained(
        folder
    )
    clip_tokenizer().save_pretrained(folder)
