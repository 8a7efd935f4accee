"""Compare one iteration of each family at equal images, and DiffusionNFT's published loop with ours, in one run.

    python -m benchmarks.families [--size tiny|compute] [--models models/tiny] [--repeats 3]
    [--json]

Every method samples, scores and trains on one prompt's images: 12, or a multiple of it where a tree
has several branches. The published loop of DiffusionNFT has the same weights, noise and times as
ours, and must have the same gradients. Sizes are those of `benchmarks.rollout`. All alternate in
one process; medians are printed.
"""

import argparse
import json
import tempfile
from functools import partial
from pathlib import Path
from statistics import median

import torch

from benchmarks.flux import timed
from benchmarks.published_loops import PublishedNoisedIteration
from benchmarks.rollout import (
    SIZES,
    gradients,
    largest_differences,
    make_models,
    make_policy,
    make_store,
)
from g2rpo_core.algorithm.batch import Draws
from g2rpo_core.algorithm.matching import NoisedBatch
from g2rpo_core.algorithm.methods import LABELS, METHODS
from g2rpo_core.config import load_profile
from g2rpo_core.data.embeddings import EmbeddingStore
from g2rpo_core.models.policy import Policy
from g2rpo_core.rewards import registry
from g2rpo_core.sampling.seeding import generator
from g2rpo_core.training.experience import score_rollout
from g2rpo_core.training.settings import RunSettings
from g2rpo_core.training.trainer import Trainer

NAMES = (
    "g2rpo",
    "g2rpo_coarse",
    "mix_grpo",
    "dance_grpo",
    "flow_grpo",
    "diffusion_nft",
    "awm",
    "advantage_flow",
    "nft_shared",
    "nft_leaves",
)
REFERENCE = "diffusion_nft"
STEPS = 10


class Iteration:
    """One iteration of a method for one prompt, without learning, so that it can be repeated."""

    def __init__(
        self, name: str, policy: Policy, store: EmbeddingStore, models: Path, changes: dict
    ):
        profile = load_profile(Path("profiles/tiny.yaml"))
        self.policy, self.sampling = (
            policy,
            profile.sampling.model_copy(update={"steps": STEPS} | changes),
        )
        still = {
            "learning_rate": 0.0,
            "max_grad_norm": 1e9,
            "batch_tokens": self.sampling.batch_tokens,
        }
        training = profile.training.model_copy(update=still)
        self.rewards = registry.load(list(training.rewards), models, policy.device)
        self.trainer = Trainer(
            RunSettings(METHODS[name], self.sampling, training), policy, store, self.rewards, seed=0
        )
        self.conditioning, self.text = store.conditioning([0]), store.prompts[0].text

    def run_ours(self) -> tuple[dict, tuple, object]:
        """Run our iteration; return its costs, its results (latents, scores, gradients), and what it trained on."""
        trainer, device = self.trainer, self.policy.device
        sampled, sampling = timed(device, lambda: trainer.sampler(self.conditioning, 0))
        score = partial(
            score_rollout,
            self.policy,
            self.rewards,
            sampled,
            [self.text],
            self.sampling.decode_batch,
            0,
        )
        scores, scoring = timed(device, score)
        advantages = trainer.objective.advantages(sampled, scores, None)

        def train() -> NoisedBatch:
            (update,) = trainer.updates(
                self.conditioning, sampled, advantages, Draws(0, 0, range(1))
            )
            trainer.update(self.conditioning, update)
            return update.batches[0]

        trained, training = timed(device, train)
        costs = {"evaluations": sampled.num_forward_evals, "images": scores[0].numel()}
        parts = {"sampling": sampling, "scoring": scoring, "training": training}
        return costs | {"parts": parts}, (sampled.clean, scores, gradients(trainer)), trained

    def run_published(self, trained: object) -> tuple[dict, tuple]:
        """Run the published loop of DiffusionNFT with the noise and times of ours; return its costs and results."""
        group, device = self.trainer.training.num_generations, self.policy.device
        initial = self.policy.noise(generator("rollout", 0, 0, 0), group)
        loop = PublishedNoisedIteration(self.trainer, self.conditioning, initial)
        clean, sampling = timed(device, loop.sample)
        scores, scoring = timed(device, lambda: loop.score(clean, self.rewards, self.text))
        by_image = lambda tensor: tensor.view(group, -1, *tensor.shape[1:])
        _, training = timed(
            device,
            lambda: loop.update(clean, scores, by_image(trained.sigma), by_image(trained.noise)),
        )
        costs = {"evaluations": loop.num_forward_evals, "images": group}
        results = (
            clean.view(1, 1, 1, *clean.shape),
            scores.view(len(scores), 1, 1, 1, group),
            gradients(self.trainer),
        )
        return costs | {
            "parts": {"sampling": sampling, "scoring": scoring, "training": training}
        }, results


def summarize(runs: list[dict], reference: list[dict]) -> dict:
    """Return the medians of an iteration's seconds, and of their ratio to the reference's of the same round, for each image."""
    seconds = lambda run: sum(run["parts"].values()) / run["images"]
    ratios = sorted(seconds(run) / seconds(other) for run, other in zip(runs, reference))
    return {
        **{name: runs[0][name] for name in ("evaluations", "images")},
        "seconds_by_part": {
            part: median(run["parts"][part] for run in runs) for part in runs[0]["parts"]
        },
        "ratio": median(ratios),
        "ratio_range": [ratios[0], ratios[-1]],
    }


def main() -> None:
    """Parse the options, measure every method in turn, and print the results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", choices=SIZES, default="tiny")
    parser.add_argument("--methods", nargs="+", choices=NAMES, default=NAMES)
    parser.add_argument(
        "--models",
        type=Path,
        help="folder made by the stage `models`; without it, hardly trained models are made",
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--json",
        action="store_true",
        help="the last line is one JSON object: method -> what was measured",
    )
    args = parser.parse_args()
    names = list(dict.fromkeys([REFERENCE, *args.methods]))
    with tempfile.TemporaryDirectory() as folder:
        # The methods, each with a trainer of its own on one policy
        models = args.models or make_models(Path(folder))
        side, batch, decode_batch, _ = SIZES[args.size]
        store, policy = make_store(models, Path(folder)), make_policy(models, side, args.device)
        tokens = batch * (
            policy.image_tokens + load_profile(Path("profiles/tiny.yaml")).embed.max_sequence_length
        )
        changes = {
            "height": side,
            "width": side,
            "batch_tokens": tokens,
            "decode_batch": decode_batch,
        }
        iterations = {name: Iteration(name, policy, store, models, changes) for name in names}
        # In turn, after one round to warm up
        runs: dict[str, list[dict]] = {name: [] for name in ("published", *names)}
        for number in range(args.repeats + 1):
            for name, iteration in iterations.items():
                costs, results, trained = iteration.run_ours()
                both = [(name, costs)]
                if name == REFERENCE:
                    costs, published = iteration.run_published(trained)
                    both.append(("published", costs))
                    apart = largest_differences(results, published)
                if number:
                    for label, one in both:
                        runs[label].append(one)
    found = {label: summarize(own, runs["published"]) for label, own in runs.items()}
    found["published"]["max_difference"] = apart
    for label, row in found.items():
        parts = ", ".join(
            f"{part} {seconds:.2f}" for part, seconds in row["seconds_by_part"].items()
        )
        low, high = row["ratio_range"]
        shown = LABELS.get(label, "DiffusionNFT, published loop")
        print(
            f"{shown:32} {row['evaluations']:5} NFE {row['images']:4} images ({parts}) "
            f"{row['ratio']:.2f} [{low:.2f}, {high:.2f}] an image"
        )
    print(
        "largest differences of the published loop: "
        + ", ".join(f"{key} {value:.1e}" for key, value in apart.items())
    )
    if args.json:
        print(json.dumps(found))


if __name__ == "__main__":
    main()
