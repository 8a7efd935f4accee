"""Compare one iteration of the published loops with ours, on equal weights and noise.

    python -m benchmarks.rollout [--size tiny|compute|all] [--models models/tiny] [--repeats 3]
    [--compile] [--json]

Prints NFE, seconds, shares of the machine's peak, and how far the results differ. Sizes: `tiny` is
the profile's (16 + 12 tokens: per-call overhead dominates); `compute` the same model on larger
images (484 + 12 tokens: arithmetic dominates, so that only saved forward evaluations and saved
training passes count). With `--compile`, ours has the setting `training.parallel.compile`, which
the published loops lack. Compiling takes minutes and is not timed.
"""

import argparse
import json
import random
import tempfile
from functools import partial
from pathlib import Path
from statistics import median

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
PROMPTS = 4  # of a second rollout where one prompt's group leaves a call half empty
Run = tuple[int, dict[str, float], tuple]  # NFE, seconds by part; latents, scores, gradients


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
    prompts = captions("shapes", 4, 0, testing=False)
    write(folder / "embeddings", prompts, encoded, "float32", shard_rows=4)
    return EmbeddingStore(folder / "embeddings")


def make_policy(models: Path, side: int, device: str, compiled: bool = False) -> Policy:
    """Load the tiny policy with random output and modulation weights.

    An untrained DiT's are zero, and so is its velocity.
    """
    policy = Policy.load_to_train(
        models / "pipeline",
        parallel=ParallelSettings(compile=compiled),
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


class Comparison:
    """Both loops of one iteration at T = 16 and 12 members, on equal weights and noise."""

    def __init__(
        self,
        name: str,
        policy: Policy,
        store: EmbeddingStore,
        models: Path,
        sampling: SamplingSettings,
    ):
        # No learning and no clipping, so that an iteration can be repeated and compared
        still = {
            "learning_rate": 0.0,
            "max_grad_norm": 1e9,
            "batch_tokens": sampling.batch_tokens,
        }
        training = load_profile(Path("profiles/tiny.yaml")).training.model_copy(update=still)
        self.policy, self.store, self.sampling = policy, store, sampling
        self.method = METHODS[name].changed(objective={"updates_per_rollout": "iteration"})
        self.group = training.num_generations
        self.rewards = registry.load(list(training.rewards), models, policy.device)
        run = RunSettings(self.method, sampling, training)
        self.trainer = Trainer(run, policy, store, self.rewards, seed=0)
        self.conditioning, self.text = store.conditioning([0]), store.prompts[0].text
        tree = self.method.tree.build(STEPS)
        self.chosen = self.method.objective.draw_steps(len(tree.sde_steps), random.Random(0))
        # What RolloutSampler draws in iteration 0
        draw = generator("rollout", 0, 0, 0)
        self.initial = policy.noise(draw)
        self.noises = [policy.noise(draw, self.group) for _ in tree.sde_steps]

    def run_ours(self) -> Run:
        """Run our iteration."""
        policy, trainer, seconds = self.policy, self.trainer, {}
        sample = partial(trainer.sampler, self.conditioning, 0)
        sampled, seconds["sampling"] = timed(policy.device, sample)
        texts, decode_batch = [self.text], self.sampling.decode_batch
        score = partial(score_rollout, policy, self.rewards, sampled, texts, decode_batch, 0)
        scores, seconds["scoring"] = timed(policy.device, score)
        objective = trainer.objective
        assert isinstance(objective, PolicyGradient)
        advantages = objective.advantages(sampled, scores, None)
        transitions = [
            TrainedTransition(transition, own, torch.ones_like(own))
            for transition, own in ((sampled.transitions[i], advantages[i]) for i in self.chosen)
        ]
        train = lambda: trainer.update(self.conditioning, objective.update(transitions))
        _, seconds["training"] = timed(policy.device, train)
        return sampled.num_forward_evals, seconds, (sampled.clean[0], scores, self.gradients())

    @torch.compiler.set_stance("force_eager")
    def run_published(self) -> Run:
        """Run the published iteration."""
        device, seconds = self.policy.device, {}
        published = PublishedIteration(self.trainer, self.conditioning, self.initial, self.noises)
        clean, seconds["sampling"] = timed(device, published.sample)
        score = partial(published.score, clean, self.rewards, self.text)
        scores, seconds["scoring"] = timed(device, score)
        _, seconds["training"] = timed(device, partial(published.update, scores, self.chosen))
        return published.num_forward_evals, seconds, (clean, scores, self.gradients())

    def gradients(self) -> torch.Tensor:
        """Return all gradients of the trained weights, flat."""
        own = (parameter.grad for parameter in self.trainer.parameters)
        return torch.cat([gradient.flatten() for gradient in own if gradient is not None])

    def leaves_calls_unfilled(self) -> bool:
        """Return whether one prompt's group leaves a call half empty."""
        size = self.policy.batch_size(self.sampling.batch_tokens, self.conditioning)
        return self.method.tree.branching == "all" and size > self.group

    def run(self, repeats: int) -> dict:
        """Run both loops in turn; return the medians of their costs, and how far they differ."""
        # Warm up, and compile
        several = self.store.conditioning(range(PROMPTS)) if self.leaves_calls_unfilled() else None
        self.run_ours()
        if several:
            self.trainer.sampler(several, 0)
        # Both loops in turn, and the bare transformer and the matrix peak at the same time
        device, runs = self.policy.device, {"published": [], "ours": []}
        plain, wide, peaks = [], [], []
        for _ in range(repeats):
            runs["published"].append(self.run_published())
            runs["ours"].append(self.run_ours())
            plain.append(plain_rate(self.policy, self.store))
            peaks.append(matrix_peak(device, PEAK_SIDE, self.policy.dtype))
            if several:
                sampled, seconds = timed(device, lambda: self.trainer.sampler(several, 0))
                wide.append(sampled.num_forward_evals / seconds)
        # Medians and shares of the peak
        published, ours = summarize(runs["published"]), summarize(runs["ours"])
        rates = {
            "rollout": ours["evaluations"] / ours["seconds_by_part"]["sampling"],
            "bare transformer": median(plain),
        }
        if wide:
            rates[f"rollout of {PROMPTS} prompts"] = median(wide)
        flops, peak = count_flops(self.policy, self.store), median(peaks)
        total = lambda run: sum(run[1].values())
        ratios = [total(theirs) / total(own) for theirs, own in zip(*runs.values())]
        return {
            "published": published,
            "ours": ours,
            "evaluations_per_second": rates,
            "share_of_peak": {name: rate * flops / peak for name, rate in rates.items()},
            "matrix_gflops": peak / 1e9,
            "gflop_per_evaluation": flops / 1e9,
            "speedup": published["seconds"] / ours["seconds"],
            "speedup_range": [min(ratios), max(ratios)],
            "max_difference": largest_differences(runs["ours"][-1][2], runs["published"][-1][2]),
        }


def summarize(runs: list[Run]) -> dict:
    """Return a loop's NFE and the medians of its seconds."""
    parts = runs[0][1]
    return {
        "evaluations": runs[0][0],
        "seconds": median(sum(seconds.values()) for _, seconds, _ in runs),
        "seconds_by_part": {part: median(run[1][part] for run in runs) for part in parts},
    }


def largest_differences(ours: tuple, published: tuple) -> dict[str, float]:
    """Return the largest differences; that of gradients is relative to the largest gradient."""
    latents, rewards, gradient = ((a - b).abs().max().item() for a, b in zip(ours, published))
    largest = published[2].abs().max().item()
    return {"latents": latents, "rewards": rewards, "gradients_relative": gradient / largest}


def plain_arguments(policy: Policy) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return latents, sigma and prompt of a call of `PLAIN_BATCH` rows."""
    latents = policy.noise(torch.Generator().manual_seed(0), PLAIN_BATCH)
    prompt = torch.zeros(PLAIN_BATCH, dtype=torch.int64, device=policy.device)
    return latents, latents.new_full((PLAIN_BATCH,), 0.7), prompt


@torch.no_grad()
@torch.compiler.set_stance("force_eager")
def count_flops(policy: Policy, store: EmbeddingStore) -> float:
    """Count the transformer's floating-point operations for one of the latents in a call."""
    with Measured() as measured:
        policy.velocity(store.conditioning([0]))(*plain_arguments(policy))
    return measured.flops / PLAIN_BATCH


@torch.no_grad()
@torch.compiler.set_stance("force_eager")
def plain_rate(policy: Policy, store: EmbeddingStore) -> float:
    """Measure forward evaluations per second of the bare transformer in batches of 12."""
    velocity, arguments = policy.velocity(store.conditioning([0])), plain_arguments(policy)
    velocity(*arguments)
    calls = 40 if policy.image_tokens < 100 else 15
    call = partial(velocity_in_batches, velocity, *arguments, PLAIN_BATCH)
    _, seconds = timed(policy.device, lambda: [call() for _ in range(calls)])
    return calls * PLAIN_BATCH / seconds


def print_result(name: str, result: dict) -> None:
    """Print what was measured in a few lines."""
    listed = lambda values, form: ", ".join(
        f"{key} {value:{form}}" for key, value in values.items()
    )
    for loop in ("published", "ours"):
        row = result[loop]
        parts = listed(row["seconds_by_part"], ".2f")
        cost = f"{row['evaluations']:5} NFE {row['seconds']:7.2f} s ({parts})"
        print(f"{name:12} {loop:10} {cost}")
    low, high = result["speedup_range"]
    differences = listed(result["max_difference"], ".1e")
    print(f"{name:12} speedup {result['speedup']:.2f}x [{low:.2f}, {high:.2f}]", end="; ")
    print(f"largest differences: {differences}")
    print(f"{name:12} NFE/s: {listed(result['evaluations_per_second'], '.0f')}")
    peak, shares = result["matrix_gflops"], listed(result["share_of_peak"], ".0%")
    print(f"{name:12} share of the matrix peak, {peak:.0f} GFLOP/s: {shares}")


def main() -> None:
    """Parse the options, compare both loops for each size and method, and print the results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    option = parser.add_argument
    option("--size", choices=[*SIZES, "all"], default="all")
    option("--methods", nargs="+", choices=NAMES, default=NAMES)
    option(
        "--models", type=Path, help="folder of the stage `models` (default: hardly trained ones)"
    )
    option("--repeats", type=int, default=3, help="of both loops, in turn; medians are printed")
    option("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    option("--compile", action="store_true", help="ours with compiled blocks")
    option("--json", action="store_true", help="the last line is a JSON object: method -> figures")
    args = parser.parse_args()
    # A method needs up to 8 variants of a block, and here three share a process
    if args.compile:
        torch._dynamo.config.recompile_limit = 64
    results, profile = {}, load_profile(Path("profiles/tiny.yaml"))
    with tempfile.TemporaryDirectory() as folder:
        models = args.models or make_models(Path(folder))
        store, texts = make_store(models, Path(folder)), profile.embed.max_sequence_length
        for size in SIZES if args.size == "all" else [args.size]:
            side, batch, decode_batch, suffix = SIZES[size]
            policy = make_policy(models, side, args.device, args.compile)
            update = {
                "steps": STEPS,
                "height": side,
                "width": side,
                "batch_tokens": batch * (policy.image_tokens + texts),
                "decode_batch": decode_batch,
            }
            sampling = profile.sampling.model_copy(update=update)
            tokens, threads = f"{policy.image_tokens} + {texts} tokens", torch.get_num_threads()
            print(f"\n{size}: {tokens}, {args.device}, {threads} threads")
            for name in args.methods:
                result = Comparison(name, policy, store, models, sampling).run(args.repeats)
                results[name + suffix] = result
                print_result(name, result)
    if args.json:
        print(json.dumps(results))


if __name__ == "__main__":
    main()
