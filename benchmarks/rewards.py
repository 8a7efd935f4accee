"""Compare each reward with its published package on equal weights: images per second, scores.

    python -m benchmarks.rewards [--models models/tiny] [--rewards hps …] [--side 32]
    [--prompts 8] [--group 12] [--json]

Both score the same images in turn, with new prompts in every repeat, so that no text is already
encoded. `files`: images as PIL opens them; `tensors`: as a rollout makes them. Published packages
get PIL images made from these: hpsv2 and image-reward, which `g2rpo_core.rewards.packages` makes
run with today's libraries, and open_clip and transformers used directly, with our weights.
"""

import argparse
import json
import math
import statistics
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import open_clip
import torch
import torch.nn.functional as F
from torchvision.transforms.v2 import functional as TF
from transformers import (
    AutoModelForImageTextToText,
    AutoProcessor,
    AutoTokenizer,
    CLIPImageProcessorPil,
    CLIPModel,
)

from benchmarks.flux import timed
from benchmarks.rollout import make_models
from g2rpo_core.config import load_profile
from g2rpo_core.hub.model_store import ModelStore
from g2rpo_core.rewards import packages, registry
from g2rpo_core.rewards.packages import Score
from g2rpo_core.rewards.preprocess import Images
from g2rpo_core.rewards.spec import Reward, RewardWithReasons
from g2rpo_core.rewards.unified_reward import UnifiedReward, UnifiedRewardSettings, conversation
from g2rpo_core.tasks.table import TASKS

PACKAGES = {
    "hps": "hpsv2",
    "clip_score": "open_clip",
    "pickscore": "transformers",
    "image_reward": "image-reward",
    "unified_reward": "transformers, one image at a time",
}
Scored = tuple[torch.Tensor, list[str | None]]  # scores [N], and why one is missing


def load_published(
    name: str, store: ModelStore, device: torch.device, settings: UnifiedRewardSettings
) -> Score:
    """Load the published scorer of a reward on the same weights; settings: UnifiedReward's."""
    folder = store.folder(name)
    match name:
        case "hps":
            return packages.hpsv2(folder, store.entry(name)["architecture"], device)
        case "clip_score":
            return clip_score(folder, device)
        case "pickscore":
            return pickscore(folder, store.folder("pickscore_processor"), device)
        case "image_reward":
            return packages.image_reward(folder, store.folder("image_reward_tokenizer"), device)
        case _:
            return unified_reward(folder, device, settings)


def clip_score(folder: Path, device: torch.device) -> Score:
    """Load open_clip as its README uses it, the images of a prompt in one batch."""
    name = f"local-dir:{folder}"
    model, _, preprocess = open_clip.create_model_and_transforms(name)
    model, tokenize = model.eval().to(device), open_clip.get_tokenizer(name)

    @torch.no_grad()
    def score(prompt, images):
        batch = torch.stack([preprocess(image) for image in images]).to(device)
        text = model.encode_text(tokenize([prompt]).to(device))
        return torch.cosine_similarity(model.encode_image(batch), text).tolist()

    return score


def pickscore(folder: Path, processor: Path, device: torch.device) -> Score:
    """Load transformers as the model card uses it, a prompt's images in one batch; score / 100."""
    model = CLIPModel.from_pretrained(folder).eval().to(device)
    tokenizer = AutoTokenizer.from_pretrained(processor)
    preprocess = CLIPImageProcessorPil.from_pretrained(processor)
    length = model.config.text_config.max_position_embeddings

    @torch.no_grad()
    def score(prompt, images):
        inputs = preprocess(list(images), return_tensors="pt").to(device)
        text = tokenizer(prompt, truncation=True, max_length=length, return_tensors="pt").to(device)
        return (model(**text, **inputs).logits_per_image[:, 0] / 100).tolist()

    return score


def unified_reward(folder: Path, device: torch.device, settings: UnifiedRewardSettings) -> Score:
    """Load transformers as the published scripts do, one image at a time; we read the answers."""
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype="auto").eval().to(device)
    processor = AutoProcessor.from_pretrained(folder)

    @torch.no_grad()
    def ask(images, questions):
        answers = []
        for (image,), text in zip(images, questions):
            how = {"add_generation_prompt": True, "tokenize": False}
            chat, image = (
                processor.apply_chat_template(conversation(text), **how),
                TF.to_pil_image(image),
            )
            inputs = processor(text=[chat], images=[image], return_tensors="pt").to(device)
            made = model.generate(**inputs, max_new_tokens=settings.max_new_tokens, do_sample=False)
            new = made[0, inputs["input_ids"].shape[1] :]
            answers.append(processor.decode(new, skip_special_tokens=True))
        return answers

    reward = UnifiedReward(ask, settings.template)
    return lambda prompt, images: reward.score_with_reasons(images, [prompt] * len(images))


def make_images(prompts: int, group: int, side: int, seed: int) -> tuple[list[str], torch.Tensor]:
    """Draw different captions and `group` images of each.

    Images are [prompts * group, 3, side, side] in [0, 1], of 8 bits.
    """
    rng, task, scenes = np.random.default_rng(seed), TASKS["shapes"], {}
    while len(scenes) < prompts:
        scene = task.random_scene(rng)
        scenes[scene.caption] = scene
    drawn = torch.from_numpy(
        np.stack([task.draw(scene, rng) for scene in scenes.values() for _ in range(group)])
    ).float()
    if drawn.shape[-1] != side:
        drawn = F.interpolate(drawn, (side, side), mode="bicubic", antialias=True)
    return list(scenes), (drawn.clamp(0, 1) * 255).round() / 255


def wrap_ours(reward: Reward) -> Callable[[Sequence[str], int, Images], Scored]:
    """Make our reward score `group` images of each prompt."""

    def score_images(prompts, group, images):
        texts = [prompt for prompt in prompts for _ in range(group)]
        if isinstance(reward, RewardWithReasons):
            return reward.score_with_reasons(images, texts)
        return reward(images, texts), [None] * len(texts)

    return score_images


def wrap_published(score: Score) -> Callable[[Sequence[str], int, Images], Scored]:
    """Make the published scorer, which takes one prompt, score `group` images of each."""

    def score_images(prompts, group, images):
        if isinstance(images, torch.Tensor):
            images = [TF.to_pil_image(image) for image in images.cpu()]
        by_prompt = [
            score(prompt, images[n * group : (n + 1) * group]) for n, prompt in enumerate(prompts)
        ]
        if isinstance(by_prompt[0], tuple):
            return torch.cat([scores for scores, _ in by_prompt]), [
                reason for _, reasons in by_prompt for reason in reasons
            ]
        return torch.tensor([value for scores in by_prompt for value in scores]), [None] * len(
            images
        )

    return score_images


def difference(ours: Scored, theirs: Scored) -> float:
    """Return the largest difference between two scores of an image.

    Infinite if one has a score or an answer that the other lacks.
    """
    if ours[1] != theirs[1]:
        return math.inf
    return torch.nan_to_num(ours[0].cpu() - theirs[0].cpu(), nan=0.0).abs().max().item()


def compare(ours, theirs, args: argparse.Namespace, tensors: bool, device: torch.device) -> dict:
    """Run both scorers in turn, alternating which goes first; the first repeat is a warm-up."""
    times, differences, count = {"ours": [], "published": []}, [], args.prompts * args.group
    for repeat in range(args.repeats + 1):
        prompts, images = make_images(args.prompts, args.group, args.side, repeat)
        images = images.to(device) if tensors else [TF.to_pil_image(image) for image in images]
        scored = {}
        both = (("ours", ours), ("published", theirs))
        for name, score_images in both[:: 1 if repeat % 2 else -1]:
            work = partial(score_images, prompts, args.group, images)
            scored[name], seconds = timed(device, work)
            if repeat:
                times[name].append(seconds)
        differences.append(difference(scored["ours"], scored["published"]))
    rates = {
        name: {"min": count / max(seconds), "median": count / statistics.median(seconds)}
        for name, seconds in times.items()
    }
    ratios = [theirs / ours for ours, theirs in zip(times["ours"], times["published"])]
    return {
        "images_per_second": rates,
        "ratio": statistics.median(ratios),
        "max_difference": max(differences),
    }


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    option = parser.add_argument
    option(
        "--models", type=Path, help="folder of the stage `models` (default: hardly trained ones)"
    )
    option("--profile", default="tiny", help="whose section `rewards` applies (%(default)s)")
    option("--rewards", nargs="+", choices=PACKAGES, default=list(PACKAGES))
    option("--prompts", type=int, default=8)
    option("--group", type=int, default=12, help="images of each prompt (%(default)s)")
    option("--side", type=int, default=32, help="side of the images in pixels (%(default)s)")
    option("--repeats", type=int, default=5)
    option("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    option("--json", action="store_true", help="the last line is a JSON object: reward -> figures")
    return parser.parse_args()


def main() -> None:
    """Parse the options, compare each reward on files and on tensors, and print the results."""
    args, results = parsed(), {}
    device = torch.device(args.device)
    section = load_profile(Path("profiles") / f"{args.profile}.yaml").rewards
    print(f"{args.prompts} prompts x {args.group} images, {args.side} x {args.side}, {device}")
    print(f"{'images/s, median (min)':33} {'ours':>17} {'published':>17}  ratio  difference")
    with tempfile.TemporaryDirectory() as folder:
        models = args.models or make_models(Path(folder))
        for name in args.rewards:
            ours = wrap_ours(registry.load([name], models, device, section)[name])
            settings = registry.settings_of(section, name)
            theirs = wrap_published(load_published(name, ModelStore(models), device, settings))
            results[name] = {}
            for source in ("files", "tensors"):
                measured = compare(ours, theirs, args, source == "tensors", device)
                results[name][source] = measured
                both = measured["images_per_second"].values()
                rates = " ".join(f"{rate['median']:9.1f} ({rate['min']:5.0f})" for rate in both)
                numbers = f"{measured['ratio']:5.2f}  {measured['max_difference']:.1e}"
                label = f"{registry.REWARDS[name].label:24} {source:8}"
                print(f"{label} {rates}  {numbers}  {PACKAGES[name]}", flush=True)
    if args.json:
        print(json.dumps(results))


if __name__ == "__main__":
    main()
