"""Measure on a GPU what to know first, with random weights at FLUX.1-dev's true size.

    make gpu-first
    python -m benchmarks.gpu_first [--profile NAME] [--deterministic] [--size tiny --device cpu]

Prints one table, in this order: how far the number of rows in a call moves a velocity, and what a
row then costs; an iteration of a profile with a LoRA: its memory, seconds and share of the peak
beside what `g2rpo plan` says; whether the same iteration gives the same bits twice; how far half
precision moves scores of HPS-v2.1's architecture. The profile is flux_smoke, or on a small GPU
flux_lora_24gb (frozen weights of 4 bits).
"""

import argparse
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import open_clip
import torch
from open_clip.constants import OPENAI_DATASET_MEAN, OPENAI_DATASET_STD

from benchmarks.flux import SIZES, found_device, inputs, make_policy, median_seconds, timed
from g2rpo_core.config import load_profile, profile_path
from g2rpo_core.config.profile import Profile
from g2rpo_core.data.embeddings import Conditioning, EmbeddingStore, write
from g2rpo_core.data.prompts import Prompt
from g2rpo_core.estimate.machines import RESERVE_GIB, Machines
from g2rpo_core.estimate.plan import make_plan
from g2rpo_core.models.policy import Policy
from g2rpo_core.numerics.cuda import describe, peak_bytes, reset_peak
from g2rpo_core.numerics.portable import use_deterministic
from g2rpo_core.rewards.preprocess import Preprocess
from g2rpo_core.rewards.similarity import CosineScore
from g2rpo_core.rewards.spec import ScorerSettings
from g2rpo_core.tracking.utilization import share_of_peak
from g2rpo_core.training.metrics import START
from g2rpo_core.training.trainer import Trainer

PROFILES = ("flux_smoke", "flux_lora_24gb")
SMALL_GIB = 40  # a GPU with less takes the second
ROWS = (1, 4, 8, 9, 12)
WARM = 3  # calls whose median is a row's time
SMALL_CLIP = {
    "embed_dim": 32, "vision_cfg": {"image_size": 32, "layers": 1, "width": 64, "patch_size": 16},
    "text_cfg": {"context_length": 77, "vocab_size": 49408, "width": 64, "heads": 1, "layers": 1},
}  # fmt: skip
SMALL_GROUP = {"prompts_per_iteration": 1, "num_generations": 2}  # instead of flux_smoke's
GIB = 2**30
Row = tuple[str, str, str]  # what, as measured, as planned


@torch.no_grad()
def by_rows(policy: Policy, conditioning: Conditioning) -> Iterator[Row]:
    """Yield a latent's velocity error and seconds by the rows of a call, relative to 1 row."""
    field, arguments = policy.velocity(conditioning), inputs(policy, max(ROWS))
    call = lambda count: field(*(each[:count] for each in arguments))[0]
    alone, first = call(1), median_seconds(partial(call, 1), policy.device, WARM)
    for count in ROWS[1:]:
        difference = ((call(count) - alone).norm() / alone.norm()).item()
        seconds = median_seconds(partial(call, count), policy.device, WARM)
        where, ratio = f"in a call of {count} rows", seconds / count / first
        yield f"velocity {where}: relative difference to 1 row", f"{difference:.1e}", "0"
        yield f"a row's seconds {where}: ratio to 1 row", f"{ratio:.2f}", "1"


def make_scorer(size: str, device: torch.device) -> CosineScore:
    """Make a scorer of HPS-v2.1's architecture, or of a smaller one, with random weights."""
    with torch.device(device):
        model = open_clip.CLIP(
            **(open_clip.get_model_config("ViT-H-14") if size == "flux" else SMALL_CLIP)
        )
    model.eval().requires_grad_(False)
    tokenize, side = open_clip.get_tokenizer("ViT-H-14"), model.visual.image_size[0]
    preprocess = Preprocess(side, "pad", OPENAI_DATASET_MEAN, OPENAI_DATASET_STD)
    encode = lambda texts: model.encode_text(tokenize(texts).to(device))
    return CosineScore(model.encode_image, encode, preprocess, device, ScorerSettings())


def make_trainer(
    profile: Profile,
    size: str,
    policy: Policy,
    conditioning: Conditioning,
    scorer: CosineScore,
    folder: Path,
) -> Trainer:
    """Make the profile's trainer of G²RPO on this policy; prompts share one random encoding."""
    run = profile.run("g2rpo")
    if size == "tiny":
        sampling = run.sampling.model_copy(update={"height": 64, "width": 64})
        training = run.training.model_copy(update=SMALL_GROUP)
        run = replace(run, sampling=sampling, training=training)
    policy = Policy(
        policy.architecture,
        policy.transformer,
        policy.vae,
        run.sampling.height,
        run.sampling.width,
        run.sampling.guidance,
        policy.dtype,
        policy.device,
    )
    count = run.training.prompts_per_iteration
    prompts = [Prompt(str(number), f"a photo of {number} cats", "") for number in range(count)]
    one = Conditioning({name: tensor[0].cpu() for name, tensor in conditioning.tensors.items()})
    write(folder, prompts, lambda part: ((prompt, one) for prompt in part), "bfloat16", count)
    rewards = dict.fromkeys(run.training.rewards, scorer)
    return Trainer(run, policy, EmbeddingStore(folder), rewards, 0)


def iterations(trainer: Trainer, profile: Profile, size: str) -> Iterator[Row]:
    """Run the first iteration twice from one state.

    Yields memory, seconds, share of the peak, and how far both ends are apart.
    """
    device, share, ends = trainer.policy.device, share_of_peak(trainer), []
    plan = make_plan(profile, "g2rpo", Machines(1, 79.0)) if size == "flux" else None
    start = [parameter.detach().clone() for parameter in trainer.parameters]
    for _ in range(2):
        with torch.no_grad():
            torch._foreach_copy_(trainer.parameters, start)
        trainer.optimizer.state.clear()
        reset_peak(device)
        record, seconds = timed(device, lambda: trainer.iterate(0))
        ends.append(torch.cat([parameter.detach().flatten() for parameter in trainer.parameters]))
    # A row of scores has one set of weights here, and two in the plan
    if peak := peak_bytes(device):
        allocated, reserved = (size / GIB for size in peak)
        gib = plan and plan.memory_total_gib - RESERVE_GIB - plan.memory_gib["rewards"] / 2
        measured = f"{allocated:.1f} ({reserved:.1f} reserved)"
        yield "GiB allocated at most in an iteration", measured, f"{gib:.1f}" if plan else "-"
    planned = f"{plan.seconds_per_iteration:.1f}" if plan else "-"
    yield "seconds of an iteration, the second time", f"{seconds:.2f}", planned
    mfu = f"{share(START, {**record, 'seconds': seconds}):.2f}" if share else "-"
    yield "share of the peak over the whole iteration", mfu, "0.4 of transformer calls"
    yield (
        "the same iteration twice: largest difference of weights",
        f"{(ends[0] - ends[1]).abs().max().item():.1e}",
        "0 with numerics: deterministic",
    )


@torch.no_grad()
def half_scores(scorer: CosineScore, device: torch.device) -> Iterator[Row]:
    """Yield how far half precision moves scores, as the published package has it on CUDA."""
    images = torch.rand(16, 3, 256, 256, generator=torch.Generator().manual_seed(0)).to(device)
    texts = [f"a photo of {number} cats" for number in range(len(images))]
    whole = scorer(images, texts)
    with torch.autocast(device.type, torch.float16 if device.type == "cuda" else torch.bfloat16):
        half = scorer(images, texts)
    yield (
        "HPS-v2.1's architecture in half precision: largest difference of a score",
        f"{(half.float() - whole).abs().max().item():.1e}",
        "-",
    )


def rows(args: argparse.Namespace, device: torch.device, folder: Path) -> Iterator[Row]:
    """Measure everything, one row of the table after the other."""
    small = device.type == "cuda" and torch.cuda.mem_get_info(device)[1] < SMALL_GIB * GIB
    chosen = args.profile or PROFILES[small]
    profile = load_profile(profile_path(chosen))
    run = profile.run("g2rpo")
    yield (
        f"{describe(device)}, torch {torch.__version__}, {args.size}, {chosen}",
        "measured",
        "planned",
    )
    yield "---", "---", "---"
    torch.manual_seed(0)
    policy, conditioning = make_policy(args.size, device, run.training.lora, run.sampling.quantize)
    yield from by_rows(policy, conditioning)
    scorer = make_scorer(args.size, device)
    trainer = make_trainer(profile, args.size, policy, conditioning, scorer, folder)
    yield from iterations(trainer, profile, args.size)
    yield from half_scores(scorer, device)


def main() -> None:
    """Parse the options, measure, and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    option = parser.add_argument
    option("--size", choices=SIZES, default="flux")
    option("--device", default="cuda")
    option("--deterministic", action="store_true", help="numerics: deterministic, to compare bits")
    option("--profile", choices=PROFILES, help="of the iteration (default: by memory)")
    args = parser.parse_args()
    if args.deterministic:
        use_deterministic()
    device = found_device(parser, args.device)
    with tempfile.TemporaryDirectory() as folder:
        for row in rows(args, device, Path(folder)):
            print(f"| {' | '.join(row)} |", flush=True)


if __name__ == "__main__":
    main()
