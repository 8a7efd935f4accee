"""Compare one iteration of the published loops with ours, on equal weights and noise.

    python -m benchmarks.rollout [--size tiny|compute] [--models models/tiny] [--repeats 3]
    [--compile]

Prints NFE, seconds, the speedup, and how far the results differ. Sizes: `tiny` is
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

from benchmarks.flux import timed
from benchmarks.published_loops import PublishedIteration
from g2rpo_core.algorithm.batch import TrainedTransition
from g2rpo_core.algorithm.methods import METHODS
from g2rpo_core.algorithm.objective import PolicyGradient
from g2rpo_core.architectures.table import text_encoders
from g2rpo_core.config import load_profile
from g2rpo_core.data.embeddings import EmbeddingStore, encode, write
from g2rpo_core.data.prompts import captions
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
Run = tuple[int, tuple]  # NFE; latents, scores, gradients


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


def compare_loops(
    name: str,
    policy: Policy,
    store: EmbeddingStore,
    models: Path,
    sampling: SamplingSettings,
    repeats: int,
) -> dict:
    """Run one iteration of both loops in turn, at T = 16, on equal weights and noise.

    Return their costs, the published loop's first, and how far the last results differ.
    """
    # No learning and no clipping, so that an iteration can be repeated and compared
    still = {"learning_rate": 0.0, "max_grad_norm": 1e9, "batch_tokens": sampling.batch_tokens}
    training = load_profile(Path("profiles/tiny.yaml")).training.model_copy(update=still)
    method = METHODS[name].changed(objective={"updates_per_rollout": "iteration"})
    rewards = registry.load(list(training.rewards), models, policy.device)
    trainer = Trainer(RunSettings(method, sampling, training), policy, store, rewards, seed=0)
    conditioning, text = store.conditioning([0]), store.prompts[0].text
    sde_steps = method.tree.build(STEPS).sde_steps
    chosen = method.objective.draw_steps(len(sde_steps), random.Random(0))
    # What RolloutSampler draws in iteration 0
    draw = generator("rollout", 0, 0, 0)
    initial = policy.noise(draw)
    noises = [policy.noise(draw, training.num_generations) for _ in sde_steps]

    def ours() -> Run:
        sampled = trainer.sampler(conditioning, 0)
        scores = score_rollout(policy, rewards, sampled, [text], sampling.decode_batch, 0)
        objective = trainer.objective
        assert isinstance(objective, PolicyGradient)
        advantages = objective.advantages(sampled, scores, None)
        transitions = [
            TrainedTransition(sampled.transitions[i], advantages[i], torch.ones_like(advantages[i]))
            for i in chosen
        ]
        trainer.update(conditioning, objective.update(transitions))
        return sampled.num_forward_evals, (sampled.clean[0], scores, gradients_of(trainer))

    @torch.compiler.set_stance("force_eager")
    def published() -> Run:
        loop = PublishedIteration(trainer, conditioning, initial, noises)
        clean = loop.sample()
        scores = loop.score(clean, rewards, text)
        loop.update(scores, chosen)
        return loop.num_forward_evals, (clean, scores, gradients_of(trainer))

    ours()  # warm up, and compile
    runs = [[timed(policy.device, loop) for loop in (published, ours)] for _ in range(repeats)]
    (theirs, published_end), (own, our_end) = (result for result, _ in runs[-1])
    seconds = [median(run[loop][1] for run in runs) for loop in (0, 1)]
    ratios = [before / after for (_, before), (_, after) in runs]
    return {
        "evaluations": [theirs, own],
        "seconds": seconds,
        "speedup": seconds[0] / seconds[1],
        "speedup_range": [min(ratios), max(ratios)],
        "max_difference": largest_differences(our_end, published_end),
    }


def gradients_of(trainer: Trainer) -> torch.Tensor:
    """Return all gradients of the trained weights, flat."""
    own = (parameter.grad for parameter in trainer.parameters)
    return torch.cat([gradient.flatten() for gradient in own if gradient is not None])


def largest_differences(ours: tuple, published: tuple) -> dict[str, float]:
    """Return the largest differences; that of gradients is relative to the largest gradient."""
    latents, rewards, gradient = ((a - b).abs().max().item() for a, b in zip(ours, published))
    largest = published[2].abs().max().item()
    return {"latents": latents, "rewards": rewards, "gradients_relative": gradient / largest}


def compare(
    models: Path,
    folder: Path,
    size: str,
    methods: Sequence[str],
    repeats: int,
    device: str,
    compiled: bool,
) -> dict[str, dict]:
    """Compare both loops for each method at a size; return what `compare_loops` does, by name."""
    profile, (side, batch, decode_batch) = load_profile(Path("profiles/tiny.yaml")), SIZES[size]
    store, texts = make_store(models, folder), profile.embed.max_sequence_length
    policy = make_policy(models, side, device, compiled)
    sampling = profile.sampling.model_copy(
        update={
            "steps": STEPS,
            "height": side,
            "width": side,
            "batch_tokens": batch * (policy.image_tokens + texts),
            "decode_batch": decode_batch,
        }
    )
    print(
        f"{size}: {policy.image_tokens} + {texts} tokens, {device}, "
        f"{torch.get_num_threads()} threads"
    )
    results = {}
    for name in methods:
        results[name] = compare_loops(name, policy, store, models, sampling, repeats)
        print(name, *(f"{what} {values}" for what, values in results[name].items()), sep="; ")
    return results


def main() -> None:
    """Parse the options, compare both loops for each method, and print the results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    option = parser.add_argument
    option("--size", choices=SIZES, default="tiny")
    option("--models", type=Path, default=Path("models/tiny"), help="of the stage `models`")
    option("--repeats", type=int, default=3, help="of both loops, in turn; medians are printed")
    option("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    option("--compile", action="store_true", help="ours with compiled blocks")
    args = parser.parse_args()
    # A method needs up to 8 variants of a block, and here three share a process
    if args.compile:
        torch._dynamo.config.recompile_limit = 64
    with tempfile.TemporaryDirectory() as folder:
        options = (args.size, NAMES, args.repeats, args.device, args.compile)
        compare(args.models, Path(folder), *options)


if __name__ == "__main__":
    main()
