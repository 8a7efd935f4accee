"""Compare one iteration by the published loops and by ours, on the same weights and noise: NFE, seconds, memory, differences.

    python -m benchmarks.rollout [--size tiny|compute|all] [--models models/tiny] [--repeats 3]
    [--compile] [--json]

Sizes: `tiny` is the profile's (16 + 12 tokens: per-call overhead dominates); `compute` the same
model on larger images (484 + 12 tokens: arithmetic dominates, so that only saved forward
evaluations and saved training passes count). With `--compile`, ours has the setting
`training.parallel.compile`, which the published loops lack. Compiling takes minutes and is not
timed.
"""

import argparse
import json
import random
import tempfile
import threading
from functools import partial
from pathlib import Path
from statistics import median

import psutil
import torch

from benchmarks.flux import matrix_peak, timed
from benchmarks.published_loops import PublishedIteration
from g2rpo_core.algorithm.batch import TrainedTransition
from g2rpo_core.algorithm.methods import METHODS
from g2rpo_core.algorithm.objective import PolicyGradient
from g2rpo_core.architectures.table import text_encoders
from g2rpo_core.config import load_profile
from g2rpo_core.data.embeddings import EmbeddingStore, encode, write
from g2rpo_core.data.prompts import captions
from g2rpo_core.hub.model_store import write_lock
from g2rpo_core.models.cost import Measured
from g2rpo_core.models.policy import Policy
from g2rpo_core.models.settings import ParallelSettings
from g2rpo_core.numerics.cuda import prepare
from g2rpo_core.rewards import registry
from g2rpo_core.sampling.rollout import velocity_in_batches
from g2rpo_core.sampling.seeding import generator
from g2rpo_core.sampling.settings import SamplingSettings
from g2rpo_core.tiny_models.build import build_models
from g2rpo_core.training.experience import score_rollout
from g2rpo_core.training.settings import RunSettings
from g2rpo_core.training.trainer import Trainer

# side of the images in pixels, latents in a call of the transformer, images in one of the VAE (each
# what is fastest on a CPU), and what is added to a method's name
SIZES = {"tiny": (32, 144, 16, ""), "compute": (176, 12, 1, "_500_tokens")}
NAMES = ("g2rpo", "dance_grpo", "mix_grpo")
STEPS, PLAIN_BATCH = 16, 12
PEAK_SIDE = 2048  # of the square matrices whose product is the machine's peak
PROMPTS = 4  # of a second rollout if one prompt's group leaves a call half empty, as with MixGRPO and DanceGRPO


class Peak:
    """Peak memory above that at its start: of the GPU's tensors, or of the process, read every 5 ms."""

    def __init__(self, device: torch.device):
        self.device, self.gib = device, 0.0

    def __enter__(self):
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
            self.start = torch.cuda.memory_allocated()
        else:
            self.process, self.done = psutil.Process(), threading.Event()
            self.start = self.highest = self.process.memory_info().rss
            self.thread = threading.Thread(target=self._watch)
            self.thread.start()
        return self

    def _watch(self):
        while not self.done.wait(0.005):
            self.highest = max(self.highest, self.process.memory_info().rss)

    def __exit__(self, *_):
        if self.device.type == "cuda":
            self.highest = torch.cuda.max_memory_allocated()
        else:
            self.done.set()
            self.thread.join()
        self.gib = (self.highest - self.start) / 2**30


def make_models(folder: Path) -> Path:
    """Build the tiny models at full size, hardly trained: their weights do not matter here."""
    settings = load_profile(Path("profiles/tiny.yaml")).models
    short = {
        name: value.model_copy(update={"steps": 3, "batch": 8})
        for name in type(settings).model_fields
        if hasattr(value := getattr(settings, name), "steps")
    }
    entries, _ = build_models(
        folder / "models", settings.model_copy(update={"images": 64, **short}), folder / "parts"
    )
    write_lock(folder / "models", entries)
    return folder / "models"


def make_store(models: Path, folder: Path) -> EmbeddingStore:
    """Encode a few prompts."""
    encoded = partial(encode, text_encoders(models / "pipeline"), max_length=12, batch=4)
    write(
        folder / "embeddings",
        captions("shapes", 4, 0, testing=False),
        encoded,
        "float32",
        shard_rows=4,
    )
    return EmbeddingStore(folder / "embeddings")


def make_policy(models: Path, side: int, device: str, compiled: bool = False) -> Policy:
    """Load the tiny policy with random output and modulation weights, as an untrained DiT's velocity is zero everywhere."""
    parallel = ParallelSettings(compile=compiled)
    policy = Policy.load_to_train(
        models / "pipeline",
        parallel=parallel,
        height=side,
        width=side,
        guidance=3.5,
        device=prepare(torch.device(device)),
    )
    random_numbers = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in policy.transformer.named_parameters():
            if "norm" in name and "linear" in name or name.startswith("proj_out"):
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=random_numbers))
    return policy


def gradients(trainer: Trainer) -> torch.Tensor:
    """Return all gradients of the trained weights, flat."""
    return torch.cat(
        [parameter.grad.flatten() for parameter in trainer.parameters if parameter.grad is not None]
    )


class Comparison:
    """Both loops for one iteration of a method at T = 16 and 12 members, on the same weights and noise."""

    def __init__(
        self,
        name: str,
        policy: Policy,
        store: EmbeddingStore,
        models: Path,
        sampling: SamplingSettings,
    ):
        profile = load_profile(Path("profiles/tiny.yaml"))
        self.policy, self.store, self.sampling = policy, store, sampling
        self.method = METHODS[name].changed(objective={"updates_per_rollout": "iteration"})
        self.training = profile.training.model_copy(
            update={
                "learning_rate": 0.0,
                "max_grad_norm": 1e9,
                "batch_tokens": sampling.batch_tokens,
            }
        )
        self.rewards = registry.load(list(self.training.rewards), models, policy.device)
        self.trainer = Trainer(
            RunSettings(self.method, sampling, self.training), policy, store, self.rewards, seed=0
        )
        self.conditioning, self.text = store.conditioning([0]), store.prompts[0].text
        tree = self.method.tree.build(STEPS)
        self.chosen = self.method.objective.draw_steps(len(tree.sde_steps), random.Random(0))
        # what RolloutSampler draws in iteration 0
        draw = generator("rollout", 0, 0, 0)
        self.initial = policy.noise(draw)
        self.noises = [policy.noise(draw, self.training.num_generations) for _ in tree.sde_steps]

    def run_ours(self) -> tuple[int, tuple, dict]:
        """Run our iteration; return its NFE, its results (latents, scores, gradients), and seconds by part."""
        policy, trainer = self.policy, self.trainer
        sampled, sampling_seconds = timed(
            policy.device, lambda: trainer.sampler(self.conditioning, 0)
        )
        score = partial(
            score_rollout, policy, self.rewards, sampled, [self.text], self.sampling.decode_batch, 0
        )
        scores, scoring_seconds = timed(policy.device, score)
        objective = trainer.objective
        assert isinstance(objective, PolicyGradient)
        advantages = objective.advantages(sampled, scores, None)
        pairs = [(sampled.transitions[index], advantages[index]) for index in self.chosen]
        transitions = [
            TrainedTransition(transition, own, torch.ones_like(own)) for transition, own in pairs
        ]
        _, training_seconds = timed(
            policy.device, lambda: trainer.update(self.conditioning, objective.update(transitions))
        )
        parts = {
            "sampling": sampling_seconds,
            "scoring": scoring_seconds,
            "training": training_seconds,
        }
        return sampled.num_forward_evals, (sampled.clean[0], scores, gradients(trainer)), parts

    @torch.compiler.set_stance("force_eager")
    def run_published(self) -> tuple[int, tuple, dict]:
        """Run the published iteration; return what `run_ours` returns."""
        device = self.policy.device
        published = PublishedIteration(self.trainer, self.conditioning, self.initial, self.noises)
        clean, sampling_seconds = timed(device, published.sample)
        scores, scoring_seconds = timed(
            device, lambda: published.score(clean, self.rewards, self.text)
        )
        _, training_seconds = timed(device, lambda: published.update(scores, self.chosen))
        parts = {
            "sampling": sampling_seconds,
            "scoring": scoring_seconds,
            "training": training_seconds,
        }
        return published.num_forward_evals, (clean, scores, gradients(self.trainer)), parts

    def leaves_calls_unfilled(self) -> bool:
        """Return whether one prompt's group leaves a call half empty, so that several prompts are measured, too."""
        size = self.policy.batch_size(self.sampling.batch_tokens, self.conditioning)
        return self.method.tree.branching == "all" and size > self.training.num_generations

    def run(self, repeats: int) -> dict:
        """Run both loops in turn; return the medians of their costs, and how far their results differ."""
        # Warm up, and compile
        self.run_ours()
        several = self.store.conditioning(range(PROMPTS)) if self.leaves_calls_unfilled() else None
        if several:
            self.trainer.sampler(several, 0)
        # Both loops in turn, and the bare transformer and the matrix peak on the same machine at
        # the same time
        device, results, runs = self.policy.device, {}, {"published": [], "ours": []}
        plain, wide, peaks = [], [], []
        for _ in range(repeats):
            for label, loop in (("published", self.run_published), ("ours", self.run_ours)):
                with Peak(device) as peak:
                    count, results[label], parts = loop()
                runs[label].append(
                    {
                        "evaluations": count,
                        "seconds": sum(parts.values()),
                        "parts": parts,
                        "peak_gib": peak.gib,
                    }
                )
            plain.append(plain_rate(self.policy, self.store))
            peaks.append(matrix_peak(device, PEAK_SIDE, self.policy.dtype))
            if several:
                sampled, seconds = timed(device, lambda: self.trainer.sampler(several, 0))
                wide.append(sampled.num_forward_evals / seconds)
        # Medians and shares of the peak
        published, ours = summarize(runs["published"]), summarize(runs["ours"])
        rates = {
            "rollout": ours["evaluations"] / ours["seconds_by_part"]["sampling"],
            "plain_batches": median(plain),
        }
        if wide:
            rates[f"rollout_of_{PROMPTS}_prompts"] = median(wide)
        ours["evaluations_per_second"] = rates["rollout"]
        ours[f"evaluations_per_second_of_{PROMPTS}_prompts"] = median(wide) if wide else None
        flops = count_flops(self.policy, self.store)
        ratios = sorted(
            theirs["seconds"] / own["seconds"]
            for theirs, own in zip(runs["published"], runs["ours"])
        )
        return {
            "published": published,
            "ours": ours,
            "plain_batches_evaluations_per_second": median(plain),
            "matrix_gflops": median(peaks) / 1e9,
            "gflop_per_evaluation": flops / 1e9,
            "share_of_peak": {name: rate * flops / median(peaks) for name, rate in rates.items()},
            "speedup": published["seconds"] / ours["seconds"],
            "speedup_range": [ratios[0], ratios[-1]],
            "max_difference": largest_differences(results["ours"], results["published"]),
        }


def summarize(runs: list[dict]) -> dict:
    """Return the medians of a loop's seconds, its NFE, and its largest peak of memory."""
    return {
        "evaluations": runs[0]["evaluations"],
        "seconds": median(run["seconds"] for run in runs),
        "seconds_by_part": {
            part: median(run["parts"][part] for run in runs) for part in runs[0]["parts"]
        },
        "peak_gib": max(run["peak_gib"] for run in runs),
    }


def largest_differences(ours: tuple, published: tuple) -> dict[str, float]:
    """Return the largest differences of latents, rewards and gradients; those of gradients relative to the largest one."""
    latents, rewards, gradient = ((a - b).abs().max().item() for a, b in zip(ours, published))
    return {
        "latents": latents,
        "rewards": rewards,
        "gradients_relative": gradient / published[2].abs().max().item(),
    }


@torch.no_grad()
@torch.compiler.set_stance("force_eager")
def count_flops(policy: Policy, store: EmbeddingStore) -> float:
    """Count the floating-point operations of the transformer for one of the latents in a call."""
    latents = policy.noise(torch.Generator().manual_seed(0), PLAIN_BATCH)
    prompt = torch.zeros(PLAIN_BATCH, dtype=torch.int64, device=policy.device)
    with Measured() as measured:
        policy.velocity(store.conditioning([0]))(
            latents, latents.new_full((PLAIN_BATCH,), 0.7), prompt
        )
    return measured.flops / PLAIN_BATCH


@torch.no_grad()
@torch.compiler.set_stance("force_eager")
def plain_rate(policy: Policy, store: EmbeddingStore) -> float:
    """Measure forward evaluations per second of the bare transformer in batches of 12, latents ready on the device."""
    conditioning = store.conditioning([0])
    velocity = policy.velocity(conditioning)
    latents = policy.noise(torch.Generator().manual_seed(0), PLAIN_BATCH)
    sigma, prompt = (
        latents.new_full((PLAIN_BATCH,), 0.7),
        torch.zeros(PLAIN_BATCH, dtype=torch.int64, device=policy.device),
    )
    velocity(latents, sigma, prompt)
    calls = 40 if policy.image_tokens < 100 else 15
    call = partial(velocity_in_batches, velocity, latents, sigma, prompt, PLAIN_BATCH)
    _, seconds = timed(policy.device, lambda: [call() for _ in range(calls)])
    return calls * PLAIN_BATCH / seconds


def print_result(name: str, result: dict) -> None:
    """Print NFE, seconds, memory and differences of both loops in a few lines."""
    ours, theirs = result["ours"], result["published"]
    for label, row in (("published", theirs), ("ours", ours)):
        parts = ", ".join(
            f"{part} {seconds:.2f}" for part, seconds in row["seconds_by_part"].items()
        )
        cost = (
            f"{row['evaluations']:5} NFE {row['seconds']:7.2f} s ({parts})  peak "
            f"+{row['peak_gib']:.2f} GiB"
        )
        print(f"{name:12} {label:10} {cost}")
    difference = ", ".join(f"{key} {value:.1e}" for key, value in result["max_difference"].items())
    low, high = result["speedup_range"]
    print(
        f"{name:12} speedup {result['speedup']:.2f}x [{low:.2f}, {high:.2f}]; largest differences: "
        f"{difference}"
    )
    wide = ours[f"evaluations_per_second_of_{PROMPTS}_prompts"]
    print(
        f"{name:12} NFE/s: rollout {ours['evaluations_per_second']:.0f}"
        + (f", of {PROMPTS} prompts {wide:.0f}" if wide else "")
        + (
            f", bare transformer in batches of {PLAIN_BATCH} "
            f"{result['plain_batches_evaluations_per_second']:.0f}"
        )
    )
    shares = ", ".join(
        f"{key.replace('_', ' ')} {share:.0%}" for key, share in result["share_of_peak"].items()
    )
    print(f"{name:12} share of the matrix peak, {result['matrix_gflops']:.0f} GFLOP/s: {shares}")


def main() -> None:
    """Parse the options, compare both loops for each size and method, and print the results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", choices=[*SIZES, "all"], default="all")
    parser.add_argument("--methods", nargs="+", choices=NAMES, default=NAMES)
    parser.add_argument(
        "--models",
        type=Path,
        help="folder made by the stage `models`; without it, hardly trained models are made",
    )
    parser.add_argument(
        "--repeats", type=int, default=3, help="repeats of both loops, in turn; medians are printed"
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--compile", action="store_true", help="ours with compiled blocks")
    parser.add_argument(
        "--json",
        action="store_true",
        help="the last line is one JSON object: method -> what was measured",
    )
    args = parser.parse_args()
    # a method needs up to 8 variants of a block, and here three share a process
    if args.compile:
        torch._dynamo.config.recompile_limit = 64
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        models = args.models or make_models(Path(folder))
        store = make_store(models, Path(folder))
        for size in SIZES if args.size == "all" else [args.size]:
            side, batch, decode_batch, suffix = SIZES[size]
            policy = make_policy(models, side, args.device, args.compile)
            profile = load_profile(Path("profiles/tiny.yaml"))
            texts = profile.embed.max_sequence_length
            tokens = batch * (policy.image_tokens + texts)
            sampling = profile.sampling.model_copy(
                update={
                    "steps": STEPS,
                    "height": side,
                    "width": side,
                    "batch_tokens": tokens,
                    "decode_batch": decode_batch,
                }
            )
            print(
                f"\n{size}: {policy.image_tokens} + {texts} tokens, {args.device}, "
                f"{torch.get_num_threads()} threads"
            )
            for name in args.methods:
                results[name + suffix] = result = Comparison(
                    name, policy, store, models, sampling
                ).run(args.repeats)
                print_result(name, result)
    if args.json:
        print(json.dumps(results))


if __name__ == "__main__":
    main()
