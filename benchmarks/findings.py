"""What reaches the paper setting's reward for fewer evaluations: variants of the methods on profile tiny, several seeds, equal budgets.

    python -m benchmarks.findings [--seeds 1 2 3] [--only "two steps, λ=3" ...] [--table]

Needs the outputs of `dvc repro embed`. Runs what findings.yaml lists and findings.parquet lacks (an interrupted call goes on where
it was), then prints the tables: differences to the base on the 256 test prompts with held-out noise, paired by prompt, with 95 %
bootstrap intervals, seed by seed. `--table` prints them without running anything.
"""

import argparse
import json
import time
from collections import deque
from functools import partial
from pathlib import Path

import pandas as pd
import torch
from ruamel.yaml import YAML

from g2rpo_core import rewards
from g2rpo_core.config import Profile, load_profile
from g2rpo_core.embeddings import EmbeddingStore
from g2rpo_core.evaluation import pictures
from g2rpo_core.methods import METHODS, Method
from g2rpo_core.model_store import ModelStore
from g2rpo_core.policy import Policy
from g2rpo_core.rewards import score_all
from g2rpo_core.statistics import paired_difference
from g2rpo_core.trainer import Trainer

from .sparing import Savings, SparingTrainer

HERE = Path(__file__).parent
RESULTS = HERE / "findings.parquet"
REWARDS = ("hps", "clip_score", "verifier")  # trained on the first two
KEY = ["variant", "budget", "learning_rate", "seed"]


def method_of_variant(entry: dict, profile: Profile) -> Method:
    """A variant's method, with profile tiny's noisy steps where the published ones are a list."""
    base = METHODS[entry["method"]]
    here = {} if base.noisy_steps == "all" else {"noisy_steps": profile.methods["g2rpo"].settings["noisy_steps"]}
    return Method.model_validate_json(json.dumps({**base.model_dump(mode="json"), **here, **entry.get("settings", {})}))


def fitted(method: Method, savings: Savings, budget: int, steps: int, group: int, seed: int) -> tuple[Method, int]:
    """How many iterations of one prompt come nearest to a budget of evaluations; a progressive window goes once over the schedule.

    Windows differ in cost: their mean over the places of one, or over 50 draws.
    """
    places = len(method.candidates(steps)) - method.window.size + 1 if method.window else 1
    progressive = method.window is not None and method.window.order == "progressive"
    moving = method.model_copy(update={"window": method.window.model_copy(update={"every": 1})}) if progressive else method
    branches = [moving.branches(steps, number, seed) for number in range(places if progressive else 50)]
    costs = [savings.evaluations(one, method, steps, group) for one in branches]
    count = max(1, round(budget * len(costs) / sum(costs)))
    if progressive:
        stay = method.window.model_copy(update={"every": max(1, count // places)})
        return method.model_copy(update={"window": stay}), count
    return method, count


def evaluate(policy: Policy, store: EmbeddingStore, scorers: dict, profile: Profile) -> pd.DataFrame:
    """One row a test prompt: its id and a column for every reward."""
    ids, scores = [], []
    settings = profile.evaluation
    for part, images in pictures(
        policy, store, len(store), settings.steps[0], profile.sampling.shift, settings.seed, settings.batch
    ):
        ids += [prompt.id for prompt in part]
        scores.append(score_all(scorers, images, [prompt.text for prompt in part]))
    return pd.DataFrame(torch.cat(scores, 1).T.numpy(), columns=list(REWARDS)).assign(prompt_id=ids)


def run(entry: dict, budget: int, learning_rate: float, seed: int, profile: Profile) -> pd.DataFrame:
    """Trains one variant and evaluates it; the base for budget 0."""
    models = Path("models/tiny")
    sampling = profile.sampling
    policy = Policy.load(
        ModelStore(models).folder("pipeline"), height=sampling.height, width=sampling.width, guidance=sampling.guidance
    )
    stores = {name: EmbeddingStore(Path("embeddings/tiny", name)) for name in ("train", "test")}
    scorers = rewards.load(REWARDS, models)
    record, start = {"evaluations": 0, "trained": 0, "iteration": 0}, time.perf_counter()
    if budget:
        method = method_of_variant(entry, profile)
        savings = Savings(**entry.get("savings", {}))
        training = profile.training.model_copy(update={**entry.get("training", {}), "learning_rate": learning_rate})
        method, count = fitted(method, savings, budget, sampling.steps, training.group_size, seed)
        training = training.model_copy(update={"iterations": count})
        trained_on = {name: scorers[name] for name in training.rewards}
        make = partial(SparingTrainer, savings=savings) if savings != Savings() else Trainer
        trainer = make(policy, method, sampling, training, stores["train"], trained_on, seed)
        record = deque(trainer.run(), maxlen=1)[0]
    costs = {"evaluations": record["evaluations"], "trained": record["trained"], "iterations": record["iteration"]}
    return evaluate(policy, stores["test"], scorers, profile).assign(**costs, seconds=time.perf_counter() - start)


def tables(results: pd.DataFrame) -> str:
    """Markdown: a row for each variant, budget and learning rate, its seeds beside each other."""
    base = results[results.variant == "base"].set_index("prompt_id")
    lines = []
    for (variant, _, rate), runs in results[results.variant != "base"].groupby(KEY[:3], sort=False):
        gains, held_out = [], []
        for seed, part in runs.groupby("seed"):
            part = part.set_index("prompt_id")
            aligned = base.loc[part.index]
            for found, columns in ((gains, ["hps", "clip_score"]), (held_out, ["verifier"])):
                found.append(paired_difference(part[columns].sum(axis=1), aligned[columns].sum(axis=1), f"{variant}/{seed}"))
        shown = lambda found: " · ".join(f"{one.mean:+.3f} [{one.low:+.3f}, {one.high:+.3f}]" for one in found)
        first = runs.drop_duplicates("seed")
        mean = sum(one.mean for one in gains) / len(gains), sum(one.mean for one in held_out) / len(held_out)
        lines.append(
            f"| {variant} | {rate:g} | {first.evaluations.mean():,.0f} | {first.trained.mean():,.0f} | {mean[0]:+.3f} | {shown(gains)} "
            f"| {mean[1]:+.3f} | {shown(held_out)} |"
        )
    head = "| variant | learning rate | evaluations | states trained | trained sum | its seeds | verifier | its seeds |\n"
    return head + "|" + "---|" * 8 + "\n" + "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--only", nargs="+", help="variants to run")
    parser.add_argument("--table", action="store_true", help="print the tables and run nothing")
    args = parser.parse_args()
    plan = YAML(typ="safe", pure=True).load((HERE / "findings.yaml").read_text())
    profile = load_profile(Path("profiles/tiny.yaml"))
    results = pd.read_parquet(RESULTS) if RESULTS.exists() else pd.DataFrame(columns=KEY)
    jobs = [("base", 0, 0.0, 0)]
    jobs += [(name, plan[budget], rate, seed) for seed in args.seeds for name, budget, rate in plan["runs"]]
    jobs += [(name, plan[budget], rate, args.seeds[0]) for name, budget, rate in plan["screened"]]
    for job in jobs:
        name, budget, rate, seed = job
        done = set(results[KEY].itertuples(index=False, name=None))
        if args.table or job in done or (args.only and budget and name not in args.only):
            continue
        found = run(plan["variants"].get(name, {}), budget, rate, seed, profile)
        for column, value in zip(KEY, job):
            found[column] = value
        results = pd.concat([results, found], ignore_index=True) if len(results) else found
        results.to_parquet(RESULTS.with_suffix(".part"), index=False)
        RESULTS.with_suffix(".part").replace(RESULTS)
        print(f"{name}, {budget} evaluations, lr {rate:g}, seed {seed}: {found.seconds[0]:.0f} s", flush=True)
    print(tables(results))


if __name__ == "__main__":
    main()
