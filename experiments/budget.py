"""Which variants of the methods reach the reward of the paper's setting with fewer forward evaluations?

It compares them on profile tiny, with several seeds and equal budgets.

    python -m experiments.budget [--seeds 1 2 3] [--only "two steps, λ=3" ...] [--table]

Needs the outputs of `dvc repro embed`. Runs what budget.yaml lists and budget.parquet lacks (so that an interrupted call
resumes), then prints the tables: differences from the base on the 256 test prompts with held-out noise, paired by prompt, with
95 % bootstrap intervals, seed by seed. `--table` prints them without running anything.
"""

import argparse
import json
import time
from collections import deque
from pathlib import Path

import pandas as pd
import torch
from ruamel.yaml import YAML

from experiments.budget_variants import BudgetVariant, VariantSampler
from g2rpo_core.algorithm.methods import METHODS, Method
from g2rpo_core.common.model_store import ModelStore
from g2rpo_core.config import Profile, load_profile
from g2rpo_core.data.embeddings import EmbeddingStore
from g2rpo_core.models.generate import generate_images
from g2rpo_core.models.policy import Policy
from g2rpo_core.reporting.statistics import Difference, paired_difference
from g2rpo_core.rewards import registry
from g2rpo_core.rewards.scoring import score_all
from g2rpo_core.sampling.schedule import even_sigmas
from g2rpo_core.training.metrics import START
from g2rpo_core.training.settings import TrainingSettings
from g2rpo_core.training.trainer import Trainer

PLAN, RESULTS = (Path(__file__).with_name(f"budget.{suffix}") for suffix in ("yaml", "parquet"))
REWARDS = ("hps", "clip_score", "verifier")  # trained on the first two
KEY = ["variant", "budget", "learning_rate", "seed"]


def method_of_variant(entry: dict, profile: Profile) -> Method:
    """A variant's method, with profile tiny's SDE steps if the published ones are a list."""
    base = METHODS[entry["method"]]
    of_tiny = {} if base.sde_steps == "all" else {"sde_steps": profile.methods["g2rpo"].settings["sde_steps"]}
    return Method.model_validate_json(json.dumps({**base.model_dump(mode="json"), **of_tiny, **entry.get("settings", {})}))


def training_of_variant(entry: dict, learning_rate: float, profile: Profile) -> TrainingSettings:
    """Profile tiny's section `training` with a variant's changes."""
    departures = {**entry.get("training", {}), "learning_rate": learning_rate}
    return TrainingSettings.model_validate_json(json.dumps({**profile.training.model_dump(mode="json"), **departures}))


def fitted(method: Method, variant: BudgetVariant, budget: int, steps: int, group: int, seed: int) -> tuple[Method, int]:
    """The number of one-prompt iterations that comes nearest to a budget of forward evaluations.

    A progressive window passes the schedule once. Windows differ in cost, so the mean counts: over the positions of a progressive
    window, or over 50 draws.
    """
    window = method.window if method.window and method.window.order == "progressive" else None
    positions = len(method.candidates(steps)) - window.size + 1 if window else 50
    moving = method.model_copy(update={"window": window.model_copy(update={"every": 1})}) if window else method
    branches = [moving.branches(steps, number, seed) for number in range(positions)]
    costs = [variant.num_forward_evals(each, method, steps, group) for each in branches]
    count = max(1, round(budget * len(costs) / sum(costs)))
    if window:
        method = method.model_copy(update={"window": window.model_copy(update={"every": max(1, count // positions)})})
    return method, count


def evaluate(policy: Policy, store: EmbeddingStore, scorers: dict, profile: Profile) -> pd.DataFrame:
    """One row per test prompt: its id and a column for every reward."""
    ids, scores = [], []
    settings = profile.evaluation
    for part, images in generate_images(
        policy, store, len(store), even_sigmas(settings.steps[0], profile.sampling.shift), settings.seed, settings.batch
    ):
        ids += [prompt.id for prompt in part]
        scores.append(score_all(scorers, images, [prompt.text for prompt in part]).values)
    return pd.DataFrame(torch.cat(scores, 1).T.numpy(), columns=list(REWARDS)).assign(prompt_id=ids)


def run(entry: dict, budget: int, learning_rate: float, seed: int, profile: Profile) -> pd.DataFrame:
    """Trains one variant and evaluates it; the base for budget 0."""
    models = Path("models/tiny")
    sampling = profile.sampling
    policy = Policy.load_to_train(
        ModelStore(models).folder("pipeline"), height=sampling.height, width=sampling.width, guidance=sampling.guidance
    )
    stores = {name: EmbeddingStore(Path("embeddings/tiny", name)) for name in ("train", "test")}
    scorers = registry.load(REWARDS, models)
    record, start = dict(START), time.perf_counter()
    if budget:
        method = method_of_variant(entry, profile)
        variant = BudgetVariant(**entry.get("variant", {}))
        training = training_of_variant(entry, learning_rate, profile)
        method, count = fitted(method, variant, budget, sampling.steps, training.num_generations, seed)
        training = training.model_copy(update={"iterations": count})
        trained_on = {name: scorers[name] for name in training.rewards}
        arguments = (policy, method, sampling, training, stores["train"], trained_on, seed)
        sampler = VariantSampler(*arguments, variant) if variant != BudgetVariant() else None
        record = deque(Trainer(*arguments, sampler=sampler).run(), maxlen=1)[0]
    costs = {"evaluations": record["num_forward_evals"], "trained": record["num_transitions"], "iterations": record["iteration"]}
    return evaluate(policy, stores["test"], scorers, profile).assign(**costs, seconds=time.perf_counter() - start)


def tables(results: pd.DataFrame) -> str:
    """Markdown: a row for each variant, budget and learning rate, with its seeds side by side."""
    base = results[results.variant == "base"].set_index("prompt_id")
    lines = []
    for (variant, _, rate), runs in results[results.variant != "base"].groupby(KEY[:3], sort=False):
        gains: list[Difference] = []
        held_out: list[Difference] = []
        for seed, part in runs.groupby("seed"):
            part = part.set_index("prompt_id")
            aligned = base.loc[part.index]
            for differences, columns in ((gains, ["hps", "clip_score"]), (held_out, ["verifier"])):
                sums = part[columns].sum(axis=1), aligned[columns].sum(axis=1)
                differences.append(paired_difference(*sums, f"{variant}/{seed}"))
        shown = lambda seeds: " · ".join(f"{gain.mean:+.3f} [{gain.low:+.3f}, {gain.high:+.3f}]" for gain in seeds)
        first = runs.drop_duplicates("seed")
        means = [sum(gain.mean for gain in seeds) / len(seeds) for seeds in (gains, held_out)]
        lines.append(
            f"| {variant} | {rate:g} | {first.evaluations.mean():,.0f} | {first.trained.mean():,.0f} | {means[0]:+.3f} | {shown(gains)} "
            f"| {means[1]:+.3f} | {shown(held_out)} |"
        )
    head = "| variant | learning rate | NFE | training transitions | training reward | its seeds | verifier | its seeds |\n"
    return head + "|" + "---|" * 8 + "\n" + "\n".join(lines)


def jobs(plan: dict, seeds: list[int]) -> list[tuple[str, int, float, int]]:
    """The key (KEY) of every run of the plan: the base first, then the runs of each seed, then those of the first seed alone."""
    each_seed = [(name, plan[budget], rate, seed) for seed in seeds for name, budget, rate in plan["runs"]]
    screened = [(name, plan[budget], rate, seeds[0]) for name, budget, rate in plan["screened"]]
    return [("base", 0, 0.0, 0), *each_seed, *screened]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--only", nargs="+", help="variants to run")
    parser.add_argument("--table", action="store_true", help="print the tables and run nothing")
    args = parser.parse_args()
    plan = YAML(typ="safe", pure=True).load(PLAN.read_text())
    profile = load_profile(Path("profiles/tiny.yaml"))
    results = pd.read_parquet(RESULTS) if RESULTS.exists() else pd.DataFrame(columns=KEY)
    for job in jobs(plan, args.seeds):
        name, budget, rate, seed = job
        done = set(results[KEY].itertuples(index=False, name=None))
        if args.table or job in done or (args.only and budget and name not in args.only):
            continue
        scores = run(plan["variants"].get(name, {}), budget, rate, seed, profile)
        for column, value in zip(KEY, job):
            scores[column] = value
        results = pd.concat([results, scores], ignore_index=True) if len(results) else scores
        results.to_parquet(RESULTS.with_suffix(".part"), index=False)
        RESULTS.with_suffix(".part").replace(RESULTS)
        print(f"{name}, {budget} forward evaluations, lr {rate:g}, seed {seed}: {scores.seconds[0]:.0f} s", flush=True)
    print(tables(results))


if __name__ == "__main__":
    main()
