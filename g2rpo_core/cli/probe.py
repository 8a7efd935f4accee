"""Measure, before training, what noise at each step does to rewards, for `g2rpo probe`."""

import json
from dataclasses import asdict

from tqdm import tqdm

from g2rpo_core.cli.asked import Asked, parse_rising
from g2rpo_core.cli.cliff import find_cliffs
from g2rpo_core.cli.options import read_profile
from g2rpo_core.config import Profile
from g2rpo_core.data.embeddings import EmbeddingStore
from g2rpo_core.foundation.errors import UserError, attempt
from g2rpo_core.foundation.profiles import OF_BASE, folders_of
from g2rpo_core.foundation.runs import BASE
from g2rpo_core.foundation.texts import echo
from g2rpo_core.hub.model_store import ModelStore
from g2rpo_core.inference.probe import Step
from g2rpo_core.inference.probe import probe as probe_noise
from g2rpo_core.inference.runs import find_weights, sampling_of
from g2rpo_core.models.policy import Policy, policy_settings
from g2rpo_core.numerics.processes import device_of
from g2rpo_core.rewards import registry


def probe(
    profile: str | None,
    study: str | None,
    run: str,
    prompts: int | None,
    group: int | None,
    granularities: str,
    seed: int,
    device: str | None,
    methods: str,
    judge: str | None,
    cliff: bool,
    rates: str,
    updates: int,
    as_json: bool,
) -> None:
    """Check the options, then measure and print; UserError before any model is loaded."""
    if prompts is None:  # a loss is small beside what a prompt's scores vary by
        prompts = 64 if cliff else 16
    name, settings = read_profile(profile, study)
    members = group or settings.training.num_generations
    tails = parse_rising(granularities, int)
    if not tails or prompts < 1 or members < 2:
        raise UserError(
            "probe: --granularities are rising whole numbers from 1, as 1,2,3; "
            "--prompts is at least 1, --group at least 2"
        )
    if study and OF_BASE in study and run != BASE[0]:
        raise UserError(
            f"probe: --run {run}: with --study {study} only its base, {BASE[0]}, is probed"
        )
    asked = Asked(
        name,
        f"{study or name}, {run}",
        settings,
        sampling_of(run, name, settings),
        find_weights(run, name),
        *folders_of(name, study),
        prompts,
        members,
        tails,
        seed,
        device_of(device),
    )
    names = [word for word in methods.split(",") if word]
    _check(asked.settings, asked.profile, names, judge)
    if cliff:
        find_cliffs(asked, names, rates, updates, judge, as_json)
    else:
        _print_steps(asked, *_measure_steps(asked), as_json)


def _check(profile: Profile, name: str, names: list[str], judge: str | None) -> None:
    """Check the named entries and the judging reward; UserError."""
    if unknown := [each for each in names if each not in profile.methods]:
        raise UserError(
            f"probe: --methods {unknown[0]}: profile {name} has only {', '.join(profile.methods)}"
        )
    if judge:
        _, problems = attempt(lambda: registry.settings_of(profile.rewards, judge), ValueError)
        if problems:
            raise UserError(f"probe: --judge {judge}: {problems[0]}")


def _measure_steps(asked: Asked) -> tuple[list[Step], int]:
    """Load everything, and probe every step; return the steps, and the number of prompts used."""
    sampling, weighted = asked.sampling, asked.settings.training.rewards
    store = EmbeddingStore(asked.embeddings / "train")
    pipeline = ModelStore(asked.models).folder("pipeline")
    store.load_encoders(pipeline, asked.device)
    policy = Policy.load(
        pipeline, asked.weights, **policy_settings(sampling.drawn, asked.device, **sampling.size)
    )
    rewards = registry.load(list(weighted), asked.models, asked.device, asked.settings.rewards)
    count = min(asked.prompts, len(store))
    first = tqdm(range(count), desc="prompts", disable=None)
    return probe_noise(
        policy, rewards, weighted, store, first, sampling, asked.tails, asked.members, asked.seed
    ), count


def _print_steps(asked: Asked, steps: list[Step], count: int, as_json: bool) -> None:
    """Print a line for every step, or the JSON list."""
    if as_json:
        echo(json.dumps([asdict(step) for step in steps]))
        return
    coarse = asked.tails[1:]
    echo(
        f"{asked.title}: training reward {' + '.join(asked.settings.training.rewards)} "
        f"over {count} prompts, groups of {asked.members}"
    )
    echo(
        "step  sigma  spread  "
        + "  ".join(f"NFE λ={each}" for each in asked.tails)
        + "".join(f"  corr. λ={each}   gap λ={each}" for each in coarse)
    )
    for step in steps:
        evaluations = "  ".join(f"{step.evaluations[each]:7,}" for each in asked.tails)
        agreement = "".join(
            f"  {step.correlation[each]:9.2f}  {step.gap[each]:+8.4f}" for each in coarse
        )
        echo(f"{step.step:4}  {step.sigma:5.3f}  {step.spread:6.4f}  {evaluations}{agreement}")
