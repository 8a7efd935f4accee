"""Compare each reward with its published package on the same weights: images per second, and how far the scores differ.

    python -m benchmarks.rewards [--models models/tiny] [--rewards hps …] [--side 32] [--prompts 8]
    [--group 12] [--json]

Both score the same images in turn, with new prompts in every repeat, so that no text is already
encoded. `files`: images as PIL opens them; `tensors`: as a rollout makes them; the published
packages get PIL images made from these: hpsv2 and image-reward, which `g2rpo_core.rewards.packages`
makes run with today's libraries, and open_clip and transformers used directly, with our weights.
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
    name: str,
    store: ModelStore,
    device: torch.device,
    settings: UnifiedRewardSettings | None = None,
) -> Score:
    """Load the published scorer of a reward of ours, on the same weights; settings: of UnifiedReward."""
    if name == "hps":
        return packages.hpsv2(store.folder("hps"), store.entry("hps")["architecture"], device)
    if name == "clip_score":
        return clip_score(store.folder("clip_score"), device)
    if name == "pickscore":
        return pickscore(store.folder("pickscore"), store.folder("pickscore_processor"), device)
    if name == "image_reward":
        return packages.image_reward(
            store.folder("image_reward"), store.folder("image_reward_tokenizer"), device
        )
    return unified_reward(
        store.folder("unified_reward"), device, settings or UnifiedRewardSettings()
    )


def clip_score(folder: Path, device: torch.device) -> Score:
    """Load open_clip as its README uses it, the images of a prompt in one batch."""
    name = f"local-dir:{folder}"
    model, _, preprocess = open_clip.create_model_and_transforms(name)
    model, tokenize = model.eval().to(device), open_clip.get_tokenizer(name)

    @torch.no_grad()
    def score(prompt, images):
        features = model.encode_image(
            torch.stack([preprocess(image) for image in images]).to(device)
        )
        return torch.cosine_similarity(
            features, model.encode_text(tokenize([prompt]).to(device))
        ).tolist()

    return score


def pickscore(folder: Path, processor: Path, device: torch.device) -> Score:
    """Load transformers as the model card uses it, the images of a prompt in one batch; over 100, as the paper's tables are."""
    model = CLIPModel.from_pretrained(folder).eval().to(device)
    tokenizer, preprocess = (
        AutoTokenizer.from_pretrained(processor),
        CLIPImageProcessorPil.from_pretrained(processor),
    )
    length = model.config.text_config.max_position_embeddings

    @torch.no_grad()
    def score(prompt, images):
        inputs = preprocess(list(images), return_tensors="pt").to(device)
        text = tokenizer(prompt, truncation=True, max_length=length, return_tensors="pt").to(device)
        return (model(**text, **inputs).logits_per_image[:, 0] / 100).tolist()

    return score


def unified_reward(folder: Path, device: torch.device, settings: UnifiedRewardSettings) -> Score:
    """Load transformers as the published scripts use it, one image at a time; the answers are read as ours are."""
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype="auto").eval().to(device)
    processor = AutoProcessor.from_pretrained(folder)

    @torch.no_grad()
    def ask(images, questions):
        answers = []
        for (image,), text in zip(images, questions):
            chat = processor.apply_chat_template(
                conversation(text), add_generation_prompt=True, tokenize=False
            )
            inputs = processor(
                text=[chat], images=[TF.to_pil_image(image)], return_tensors="pt"
            ).to(device)
            made = model.generate(**inputs, max_new_tokens=settings.max_new_tokens, do_sample=False)
            answers.append(
                processor.decode(made[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
            )
        return answers

    reward = UnifiedReward(ask, settings.template)
    return lambda prompt, images: reward.score_with_reasons(images, [prompt] * len(images))


def make_images(prompts: int, group: int, side: int, seed: int) -> tuple[list[str], torch.Tensor]:
    """Draw different captions and `group` images of each, [prompts * group, 3, side, side] in [0, 1] of 8 bits."""
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
    """Return the largest difference between two scores of an image; infinite if one has a score or an answer that the other lacks."""
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
        for name, score_images in (("ours", ours), ("published", theirs))[
            :: 1 if repeat % 2 else -1
        ]:
            scored[name], seconds = timed(
                device, partial(score_images, prompts, args.group, images)
            )
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


def main() -> None:
    """Parse the options, compare each reward on files and on tensors, and print the results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--models",
        type=Path,
        help="folder made by the stage `models`; without it, small models are made, hardly trained",
    )
    parser.add_argument(
        "--profile",
        default="tiny",
        help="profile whose section `rewards` applies (default: %(default)s)",
    )
    parser.add_argument("--rewards", nargs="+", choices=PACKAGES, default=list(PACKAGES))
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument(
        "--group", type=int, default=12, help="images of each prompt (default: %(default)s)"
    )
    parser.add_argument(
        "--side", type=int, default=32, help="side of the images in pixels (default: %(default)s)"
    )
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--json",
        action="store_true",
        help="the last line is one JSON object: reward -> what was measured",
    )
    args = parser.parse_args()
    device, section = (
        torch.device(args.device),
        load_profile(Path("profiles") / f"{args.profile}.yaml").rewards,
    )
    print(
        f"{args.prompts} prompts x {args.group} images, {args.side} x {args.side}, {device}, "
        f"{torch.get_num_threads()} threads"
    )
    print(
        f"{'images/s, median (min)':24} {'':8} {'ours':>17} {'published':>17}  ratio  largest "
        "difference"
    )
    # Each reward on files and on tensors
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        models = args.models or make_models(Path(folder))
        for name in args.rewards:
            ours = wrap_ours(registry.load([name], models, device, section)[name])
            theirs = wrap_published(
                load_published(
                    name, ModelStore(models), device, registry.settings_of(section, name)
                )
            )
            results[name] = {}
            for source in ("files", "tensors"):
                measured = results[name][source] = compare(
                    ours, theirs, args, source == "tensors", device
                )
                rates = (
                    f"{rate['median']:9.1f} ({rate['min']:5.0f})"
                    for rate in measured["images_per_second"].values()
                )
                numbers = (
                    f"{' '.join(rates)}  {measured['ratio']:5.2f}  {measured['max_difference']:.1e}"
                )
                print(
                    f"{registry.REWARDS[name].label:24} {source:8} {numbers}  {PACKAGES[name]}",
                    flush=True,
                )
    if args.json:
        print(json.dumps(results))


if __name__ == "__main__":
    main()
