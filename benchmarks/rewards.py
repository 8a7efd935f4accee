"""Images per second of each reward, ours beside the published package's on the same weights, and how far their scores differ.

    python -m benchmarks.rewards [--models models/tiny] [--rewards hps …] [--side 32] [--prompts 8] [--group 12] [--json]

Both score the same images in turn, with new prompts in every repeat, so that no text is already encoded. `files`: images as PIL
opens them; `tensors`: as a rollout makes them; the published packages get PIL images made from these.
"""

import argparse
import json
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torchvision.transforms.v2 import functional as TF

from benchmarks.rollout import make_models
from g2rpo_core.common.model_store import ModelStore
from g2rpo_core.config import load_profile
from g2rpo_core.rewards import registry
from g2rpo_core.rewards.preprocess import Images
from g2rpo_core.rewards.spec import Reward, RewardWithReasons
from g2rpo_core.worlds.table import WORLDS
from reference import upstream_scorers as upstream

PACKAGES = {
    "hps": "hpsv2", "clip_score": "open_clip", "pickscore": "transformers", "image_reward": "image-reward",
    "unified_reward": "transformers, one image at a time",
}  # fmt: skip
Scored = tuple[torch.Tensor, list[str | None]]  # scores [N], and why one is missing


def make_images(prompts: int, group: int, side: int, seed: int) -> tuple[list[str], torch.Tensor]:
    """Different captions and `group` images drawn for each, [prompts * group, 3, side, side] in [0, 1] of 8 bits."""
    rng, world, scenes = np.random.default_rng(seed), WORLDS["shapes"], {}
    while len(scenes) < prompts:
        scene = world.random_scene(rng)
        scenes[scene.caption] = scene
    drawn = torch.from_numpy(np.stack([world.draw(scene, rng) for scene in scenes.values() for _ in range(group)])).float()
    if drawn.shape[-1] != side:
        drawn = F.interpolate(drawn, (side, side), mode="bicubic", antialias=True)
    return list(scenes), (drawn.clamp(0, 1) * 255).round() / 255


def ours_of(reward: Reward) -> Callable[[Sequence[str], int, Images], Scored]:
    def score_images(prompts, group, images):
        texts = [prompt for prompt in prompts for _ in range(group)]
        if isinstance(reward, RewardWithReasons):
            return reward.score_with_reasons(images, texts)
        return reward(images, texts), [None] * len(texts)

    return score_images


def theirs_of(score: upstream.Score) -> Callable[[Sequence[str], int, Images], Scored]:
    def score_images(prompts, group, images):
        if isinstance(images, torch.Tensor):
            images = [TF.to_pil_image(image) for image in images.cpu()]
        by_prompt = [score(prompt, images[n * group : (n + 1) * group]) for n, prompt in enumerate(prompts)]
        if isinstance(by_prompt[0], tuple):
            return torch.cat([scores for scores, _ in by_prompt]), [reason for _, reasons in by_prompt for reason in reasons]
        return torch.tensor([value for scores in by_prompt for value in scores]), [None] * len(images)

    return score_images


def difference(ours: Scored, theirs: Scored) -> float:
    """The largest difference between two scores of an image; infinite if one has a score or an answer that the other lacks."""
    if ours[1] != theirs[1]:
        return math.inf
    return torch.nan_to_num(ours[0].cpu() - theirs[0].cpu(), nan=0.0).abs().max().item()


def seconds_of(work: Callable[[], Scored], device: torch.device) -> tuple[Scored, float]:
    start = time.perf_counter()
    scored = work()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return scored, time.perf_counter() - start


def compare(ours, theirs, args: argparse.Namespace, tensors: bool, device: torch.device) -> dict:
    """Runs both scorers in turn, alternating which goes first; the first repeat is a warm-up."""
    times, differences, count = {"ours": [], "published": []}, [], args.prompts * args.group
    for repeat in range(args.repeats + 1):
        prompts, images = make_images(args.prompts, args.group, args.side, repeat)
        images = images.to(device) if tensors else [TF.to_pil_image(image) for image in images]
        scored = {}
        for name, score_images in (("ours", ours), ("published", theirs))[:: 1 if repeat % 2 else -1]:
            scored[name], seconds = seconds_of(partial(score_images, prompts, args.group, images), device)
            if repeat:
                times[name].append(seconds)
        differences.append(difference(scored["ours"], scored["published"]))
    rates = {name: {"min": count / max(seconds), "median": count / statistics.median(seconds)} for name, seconds in times.items()}
    ratios = [theirs / ours for ours, theirs in zip(times["ours"], times["published"])]
    return {"pictures_per_second": rates, "ratio": statistics.median(ratios), "max_difference": max(differences)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--models", type=Path, help="folder made by the stage `models`; without it, small models are made, hardly trained"
    )
    parser.add_argument("--profile", default="tiny", help="profile whose section `rewards` applies (default: %(default)s)")
    parser.add_argument("--rewards", nargs="+", choices=PACKAGES, default=list(PACKAGES))
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--group", type=int, default=12, help="images of each prompt (default: %(default)s)")
    parser.add_argument("--side", type=int, default=32, help="side of the images in pixels (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", action="store_true", help="the last line is one JSON object: reward -> what was measured")
    args = parser.parse_args()
    device, section = torch.device(args.device), load_profile(Path("profiles") / f"{args.profile}.yaml").rewards
    print(f"{args.prompts} prompts x {args.group} images, {args.side} x {args.side}, {device}, {torch.get_num_threads()} threads")
    print(f"{'images/s, median (min)':24} {'':8} {'ours':>17} {'published':>17}  ratio  largest difference")
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        models = args.models or make_models(Path(folder))
        for name in args.rewards:
            ours = ours_of(registry.load([name], models, device, section)[name])
            theirs = theirs_of(upstream.load(name, ModelStore(models), device, registry.settings_of(section, name)))
            results[name] = {}
            for source in ("files", "tensors"):
                measured = results[name][source] = compare(ours, theirs, args, source == "tensors", device)
                rates = (f"{rate['median']:9.1f} ({rate['min']:5.0f})" for rate in measured["pictures_per_second"].values())
                numbers = f"{' '.join(rates)}  {measured['ratio']:5.2f}  {measured['max_difference']:.1e}"
                print(f"{registry.REWARDS[name].label:24} {source:8} {numbers}  {PACKAGES[name]}", flush=True)
    if args.json:
        print(json.dumps(results))


if __name__ == "__main__":
    main()
