"""Pictures per second of each reward, ours beside the published package's on the same weights, and how far their scores differ.

    python -m benchmarks.rewards [--models models/tiny] [--rewards hps …] [--side 32] [--prompts 8] [--group 12] [--json]

Both score the same pictures in turn, in every repeat other prompts, so that no text is found encoded. `files`: pictures as PIL
opens them; `tensors`: as a rollout leaves them, which the published packages get as PIL pictures made from them.
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

from benchmarks import upstream
from benchmarks.rollout import make_models
from g2rpo_core import rewards
from g2rpo_core.config import load_profile
from g2rpo_core.model_store import ModelStore
from g2rpo_core.rewards.pictures import Pictures
from g2rpo_core.rewards.settings import settings_of
from g2rpo_core.shapes.scenes import draw, random_scene

PACKAGES = {
    "hps": "hpsv2", "clip_score": "open_clip", "pickscore": "transformers", "image_reward": "image-reward",
    "unified_reward": "transformers, a picture at a time",
}  # fmt: skip
Judged = tuple[torch.Tensor, list[str | None]]  # scores [N], and why one is missing


def make_pictures(prompts: int, group: int, side: int, seed: int) -> tuple[list[str], torch.Tensor]:
    """Different captions and `group` pictures drawn for each, [prompts * group, 3, side, side] in [0, 1] of 8 bits."""
    rng, scenes = np.random.default_rng(seed), {}
    while len(scenes) < prompts:
        scene = random_scene(rng)
        scenes[scene.caption] = scene
    drawn = torch.from_numpy(np.stack([draw(scene, rng) for scene in scenes.values() for _ in range(group)])).float()
    if drawn.shape[-1] != side:
        drawn = F.interpolate(drawn, (side, side), mode="bicubic", antialias=True)
    return list(scenes), (drawn.clamp(0, 1) * 255).round() / 255


def ours_of(reward: rewards.Reward) -> Callable[[Sequence[str], int, Pictures], Judged]:
    def judge(prompts, group, pictures):
        texts = [prompt for prompt in prompts for _ in range(group)]
        return (
            reward.judge(pictures, texts) if isinstance(reward, rewards.Judge) else (reward(pictures, texts), [None] * len(texts))
        )

    return judge


def theirs_of(score: upstream.Score) -> Callable[[Sequence[str], int, Pictures], Judged]:
    def judge(prompts, group, pictures):
        if isinstance(pictures, torch.Tensor):
            pictures = [TF.to_pil_image(picture) for picture in pictures.cpu()]
        found = [score(prompt, pictures[n * group : (n + 1) * group]) for n, prompt in enumerate(prompts)]
        if isinstance(found[0], tuple):
            return torch.cat([scores for scores, _ in found]), [reason for _, reasons in found for reason in reasons]
        return torch.tensor([value for scores in found for value in scores]), [None] * len(pictures)

    return judge


def difference(ours: Judged, theirs: Judged) -> float:
    """The largest between two scores of a picture; infinite where one has a score or an answer that the other has not."""
    if ours[1] != theirs[1]:
        return math.inf
    return torch.nan_to_num(ours[0].cpu() - theirs[0].cpu(), nan=0.0).abs().max().item()


def seconds_of(work: Callable[[], Judged], device: torch.device) -> tuple[Judged, float]:
    start = time.perf_counter()
    judged = work()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return judged, time.perf_counter() - start


def compare(ours, theirs, args: argparse.Namespace, tensors: bool, device: torch.device) -> dict:
    """Both scorers in turn, first one then the other first; the first of all repeats is a warm-up."""
    times, differences, count = {"ours": [], "published": []}, [], args.prompts * args.group
    for repeat in range(args.repeats + 1):
        prompts, images = make_pictures(args.prompts, args.group, args.side, repeat)
        pictures = images.to(device) if tensors else [TF.to_pil_image(image) for image in images]
        judged = {}
        for name, judge in (("ours", ours), ("published", theirs))[:: 1 if repeat % 2 else -1]:
            judged[name], seconds = seconds_of(partial(judge, prompts, args.group, pictures), device)
            if repeat:
                times[name].append(seconds)
        differences.append(difference(judged["ours"], judged["published"]))
    rates = {name: {"min": count / max(seconds), "median": count / statistics.median(seconds)} for name, seconds in times.items()}
    ratios = [theirs / ours for ours, theirs in zip(times["ours"], times["published"])]
    return {"pictures_per_second": rates, "ratio": statistics.median(ratios), "max_difference": max(differences)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--models", type=Path, help="folder of the stage `models`; without it, small ones are made, hardly trained"
    )
    parser.add_argument("--profile", default="tiny", help="whose section `rewards` holds (default: %(default)s)")
    parser.add_argument("--rewards", nargs="+", choices=PACKAGES, default=list(PACKAGES))
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--group", type=int, default=12, help="pictures of each prompt (default: %(default)s)")
    parser.add_argument("--side", type=int, default=32, help="of the pictures, in pixels (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", action="store_true", help="the last line is one JSON object: reward -> what was measured")
    args = parser.parse_args()
    device, section = torch.device(args.device), load_profile(Path("profiles") / f"{args.profile}.yaml").rewards
    print(
        f"{args.prompts} prompts x {args.group} pictures, {args.side} x {args.side}, {device}, {torch.get_num_threads()} threads"
    )
    print(f"{'pictures/s, median (min)':24} {'':8} {'ours':>17} {'published':>17}  ratio  largest difference")
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        models = args.models or make_models(Path(folder))
        for name in args.rewards:
            ours = ours_of(rewards.load([name], models, device, section)[name])
            theirs = theirs_of(upstream.load(name, ModelStore(models), device, settings_of(section, name, rewards.REWARDS)))
            results[name] = {}
            for kind in ("files", "tensors"):
                found = results[name][kind] = compare(ours, theirs, args, kind == "tensors", device)
                rates = (f"{one['median']:9.1f} ({one['min']:5.0f})" for one in found["pictures_per_second"].values())
                numbers = f"{' '.join(rates)}  {found['ratio']:5.2f}  {found['max_difference']:.1e}"
                print(f"{rewards.LABELS[name]:24} {kind:8} {numbers}  {PACKAGES[name]}", flush=True)
    if args.json:
        print(json.dumps(results))


if __name__ == "__main__":
    main()
