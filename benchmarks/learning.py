"""Ten ways of learning nothing, on models and prompts of profile `tiny`, beside a run that learns.

    python -m benchmarks.learning [--method g2rpo] [--ways "dice" ...]

Prints a row for each: what "can this run learn?" warns of before the first iteration and after ten,
and what other programs' logs show then, from the first iteration to the last: mean reward, norm of
the gradient, loss. docs/explanation/learning.md has the table.
"""

import argparse
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from pydantic import ValidationError

from g2rpo_core.config import load_profile, profile_path
from g2rpo_core.data.embeddings import EmbeddingStore
from g2rpo_core.foundation.errors import UserError
from g2rpo_core.foundation.settings import problems_of
from g2rpo_core.foundation.texts import echo
from g2rpo_core.models.policy import Policy, policy_settings
from g2rpo_core.rewards import registry
from g2rpo_core.rewards.spec import Reward
from g2rpo_core.training.loop import train
from g2rpo_core.training.metrics import HeldOut
from g2rpo_core.training.settings import RunSettings, TrainingSettings
from g2rpo_core.training.trainer import Trainer

ITERATIONS, HELD_OUT = 10, 64
MODELS, EMBEDDINGS = Path("models", "tiny"), Path("embeddings", "tiny")
Judge = Callable[[Reward, Sequence[str]], Reward]  # hps and all texts -> what scores instead


def other_prompts(reward: Reward, texts: Sequence[str]) -> Reward:
    """Return a reward that is asked about the seventh prompt after an image's own."""
    following = dict(zip(texts, [*texts[7:], *texts[:7]]))
    return lambda images, prompts: reward(images, [following[prompt] for prompt in prompts])


def in_bfloat16(policy: Policy) -> None:
    """Keep trained weights in bfloat16, whose neighbours are further apart than a step."""
    policy.dtype = torch.bfloat16
    policy.transformer.to(torch.bfloat16)


@dataclass(frozen=True)
class Way:
    """What is changed of an ordinary run."""

    training: Mapping[str, object] = field(default_factory=dict)
    judge: Judge = lambda reward, texts: reward
    spoil: Callable[[Policy], None] = lambda policy: None


WAYS = {
    "none: an ordinary run": Way(),
    "dead targets": Way({"lora": {"rank": 4, "alpha": 4, "target_modules": ("to_q", "too_k")}}),
    "tiny weights": Way({"rewards": {"hps": 1e-6}}),
    "dice": Way(judge=lambda reward, texts: lambda images, prompts: torch.rand(len(images))),
    "a constant judge": Way(
        {}, lambda reward, texts: lambda images, prompts: torch.ones(len(images))
    ),
    "rate 1e-9": Way({"learning_rate": 1e-9}),
    "clip 0": Way({"clip_range": 0.0}),
    "clip of advantages 1e-9": Way({"adv_clip_max": 1e-9}),
    "clip of gradients 1e-7": Way({"max_grad_norm": 1e-7}),
    "equal rewards in a group": Way(
        judge=lambda reward, texts: (
            lambda images, prompts: torch.tensor([*map(len, prompts)]).float()
        )
    ),
    "frozen by dtype": Way(spoil=in_bfloat16),
    "wrong sign": Way({"rewards": {"hps": -1.0}}),
    "another prompt": Way(judge=other_prompts),
}


def learn(way: Way, method: str, folder: Path) -> tuple[list[str], list[str], list[dict]]:
    """Train; return what is warned of before the first iteration and at the end, and records."""
    run = load_profile(profile_path("tiny")).run(method)
    changes = {"rewards": {"hps": 1.0}, "iterations": ITERATIONS} | way.training
    training = TrainingSettings.model_validate(run.training.model_dump() | changes)
    stores = [EmbeddingStore(EMBEDDINGS / part) for part in ("train", "test")]
    drawn = policy_settings(run.sampling.drawn, torch.device("cpu"), **run.sampling.size)
    policy = Policy.load_to_train(MODELS / "pipeline", training.lora, **drawn)
    way.spoil(policy)
    hps = registry.load(["hps"], MODELS, policy.device, {})["hps"]
    texts = [prompt.text for store in stores for prompt in store.prompts]
    rewards = {"hps": way.judge(hps, texts)}
    settings = RunSettings(run.method, run.sampling, training)
    trainer = Trainer(settings, policy, stores[0], rewards, 1)
    how = {"weights": training.reward_weights, "folder": folder}
    measure = HeldOut(policy, stores[1], rewards, HELD_OUT, run.sampling, **how)
    warnings: dict[int, list[str]] = {}
    records: list[dict] = []
    warn = lambda iteration, text: warnings.setdefault(iteration, []).append(text)
    try:
        train(trainer, folder, measure, records.append, warn)
    except UserError as error:
        warn(1, str(error))
    before = warnings.pop(0, [])
    return before, [text for texts in warnings.values() for text in texts], records


def main() -> None:
    """Parse the options, train in every way, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--method", default="g2rpo")
    parser.add_argument("--ways", nargs="*", default=list(WAYS))
    args = parser.parse_args()
    echo("| way | before the first iteration | after ten | reward | gradient | loss |")
    echo("|---|---|---|---|---|---|")
    for name in args.ways:
        before, after, records = [], [], []
        with tempfile.TemporaryDirectory() as folder:
            try:
                before, after, records = learn(WAYS[name], args.method, Path(folder))
            except UserError as error:
                before = [f"refused: {error}"]
            except ValidationError as error:
                before = [f"refused: {text}" for text in problems_of(error, TrainingSettings)]
        logged = [
            " → ".join(f"{record[column]:.2g}" for record in (records[1], records[-1]))
            if len(records) > 1
            else ""
            for column in ("reward_hps", "grad_norm", "loss")
        ]
        echo(f"| {' | '.join([name, '; '.join(before), '; '.join(after), *logged])} |")


if __name__ == "__main__":
    main()
