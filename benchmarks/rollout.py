"""Compare one iteration of the published loops with ours, on equal weights and noise.

    python -m benchmarks.rollout [--size tiny|compute] [--models models/tiny] [--repeats 3]
    [--compile]

Prints NFE, seconds, shares of the machine's peak, and how far the results differ. Sizes: `tiny` is
the profile's (16 + 12 tokens: per-call overhead dominates); `compute` the same model on larger
images (484 + 12 tokens: arithmetic dominates, so that only saved forward evaluations and saved
training passes count). With `--compile`, ours has the setting `training.parallel.compile`, which
the published loops lack. Compiling takes minutes and is not timed.
"""

import argparse
import random
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import median

import torch

from benchmarks.flux import inputs, matrix_peak, timed
from benchmarks.published_loops import PublishedIteration
from g2rpo_core.algorithm.batch import TrainedTransition
from g2rpo_core.algorithm.methods import METHODS
from g2rpo_core.algorithm.objective import PolicyGradient
from g2rpo_core.architectures.table import text_encoders
from g2rpo_core.config import load_profile
from g2rpo_core.data.embeddings import EmbeddingStore, encode, write
from g2rpo_core.data.prompts import captions
from g2rpo_core.models.cost import Measured
from g2rpo_core.models.policy import Policy
from g2rpo_core.models.settings import ParallelSettings
from g2rpo_core.numerics.cuda import prepare
from g2rpo_core.rewards import registry
from g2rpo_core.sampling.seeding import generator
from g2rpo_core.sampling.settings import SamplingSettings
from g2rpo_core.training.experience import score_rollout
from g2rpo_core.training.settings import RunSettings
from g2rpo_core.training.trainer import Trainer

# side of the images in pixels, latents in a call of the transformer, images in one of the VAE (each
# what is fastest on a CPU)
SIZES = {"tiny": (32, 144, 16), "compute": (176, 12, 1)}
NAMES = ("g2rpo", "dance_grpo", "mix_grpo")
STEPS = 16
PEAK_SIDE = 2048  # of the square matrices whose product is the machine's peak
Run = tuple[int, dict[str, float], tuple]  # NFE, seconds by part; latents, scores, gradients


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

    def run(self, repeats: int) -> dict:
        """Run both loops in turn; return the medians of their costs, and how far they differ."""
        self.run_ours()  # warm up, and compile
        device, runs, peaks = self.policy.device, {"published": [], "ours": []}, []
        for _ in range(repeats):
            runs["published"].append(self.run_published())
            runs["ours"].append(self.run_ours())
            peaks.append(matrix_peak(device, PEAK_SIDE, self.policy.dtype))
        published, ours = summarize(runs["published"]), summarize(runs["ours"])
        rate = ours["evaluations"] / ours["seconds_by_part"]["sampling"]
        total = lambda run: sum(run[1].values())
        ratios = [total(theirs) / total(own) for theirs, own in zip(*runs.values())]
        return {
            "published": published,
            "ours": ours,
            "share_of_peak": rate * count_flops(self.policy, self.store) / median(peaks),
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


@torch.no_grad()
@torch.compiler.set_stance("force_eager")
def count_flops(policy: Policy, store: EmbeddingStore) -> float:
    """Count the transformer's floating-point operations for one latent."""
    with Measured() as measured:
        policy.velocity(store.conditioning([0]))(*inputs(policy, 1))
    return measured.flops


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
    print(f"{name:12} share of the matrix peak: {result['share_of_peak']:.0%}")


def compare(
    models: Path,
    folder: Path,
    size: str,
    methods: Sequence[str],
    repeats: int,
    device: str,
    compiled: bool,
) -> dict[str, dict]:
    """Compare both loops for each method at a size; return what `Comparison.run` does, by name."""
    profile, (side, batch, decode_batch) = load_profile(Path("profiles/tiny.yaml")), SIZES[size]
    store, texts = make_store(models, folder), profile.embed.max_sequence_length
    policy = make_policy(models, side, device, compiled)
    update = {
        "steps": STEPS,
        "height": side,
        "width": side,
        "batch_tokens": batch * (policy.image_tokens + texts),
        "decode_batch": decode_batch,
    }
    sampling = profile.sampling.model_copy(update=update)
    tokens, threads = f"{policy.image_tokens} + {texts} tokens", torch.get_num_threads()
    print(f"{size}: {tokens}, {device}, {threads} threads")
    results = {}
    for name in methods:
        results[name] = Comparison(name, policy, store, models, sampling).run(repeats)
        print_result(name, results[name])
    return results


def main() -> None:
    """Parse the options, compare both loops for each method, and print the results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    option = parser.add_argument
    option("--size", choices=SIZES, default="tiny")
    option("--methods", nargs="+", choices=NAMES, default=NAMES)
    option("--models", type=Path, default=Path("models/tiny"), help="of the stage `models`")
    option("--repeats", type=int, default=3, help="of both loops, in turn; medians are printed")
    option("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    option("--compile", action="store_true", help="ours with compiled blocks")
    args = parser.parse_args()
    # A method needs up to 8 variants of a block, and here three share a process
    if args.compile:
        torch._dynamo.config.recompile_limit = 64
    with tempfile.TemporaryDirectory() as folder:
        options = (args.size, args.methods, args.repeats, args.device, args.compile)
        compare(args.models, Path(folder), *options)


if __name__ == "__main__":
    main()
