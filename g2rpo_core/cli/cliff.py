"""Find the learning rate from which on a run loses a held-out score, for `g2rpo probe --cliff`."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict

from tqdm import tqdm

from g2rpo_core.cli.asked import Asked, parse_rising
from g2rpo_core.config.profile import ResolvedRun
from g2rpo_core.data.embeddings import EmbeddingStore
from g2rpo_core.foundation.errors import UserError
from g2rpo_core.foundation.texts import echo
from g2rpo_core.hub.model_store import ModelStore
from g2rpo_core.inference.cliff import Walk, cliff, load_policy, walks
from g2rpo_core.inference.runs import find_start
from g2rpo_core.rewards import registry


def find_cliffs(
    asked: Asked, names: Sequence[str], times: str, updates: int, judge: str | None, as_json: bool
) -> None:
    """Train every named entry for some steps at each rate, and print what is lost.

    times: factors of the entry's rate, as 1,2,4,8. judge: a reward that it is not trained on; None:
    the first such one of `training.monitor.rewards`.
    """
    # Check what is asked
    factors = parse_rising(times, float)
    if not factors:
        raise UserError(
            f"probe: --rates are rising factors of the rate, as 1,2,4,8 (got {times!r})"
        )
    if not names or updates < 1 or asked.prompts < 2:
        raise UserError(
            "probe: --cliff needs entries of the profile, as --methods mix_grpo,dance_grpo; "
            "--updates is at least 1, --prompts at least 2"
        )
    runs = [asked.settings.run(name) for name in names]
    judges = {run.name: judge or _held_out(run) for run in runs}
    every: dict[str, list[Walk]] = {}
    if not as_json:
        echo(
            f"{asked.title}: {updates} optimizer steps or a few more at each rate, "
            f"{asked.prompts} held-out prompts",
            "entry            rate     drift  held-out reward     change       ±",
        )
    for walk in _walk(asked, runs, judges, factors, updates):
        every.setdefault(walk.method, []).append(walk)
        if not as_json:  # as it ends: a rate takes minutes on a large model
            _print(walk)
    if as_json:
        echo(json.dumps([asdict(walk) for found in every.values() for walk in found]))
    else:
        echo(*(_conclusion(found, judges[name]) for name, found in every.items()))


def _walk(
    asked: Asked,
    runs: Sequence[ResolvedRun],
    judges: Mapping[str, str],
    factors: Sequence[float],
    updates: int,
) -> Iterator[Walk]:
    """Load everything, and walk with every entry at every rate; judges: by entry."""
    prompts = EmbeddingStore(asked.embeddings / "train"), EmbeddingStore(asked.embeddings / "test")
    pipeline = ModelStore(asked.models).folder("pipeline")
    prompts[0].load_encoders(pipeline, asked.device)
    looked_at = {
        run.name: dict.fromkeys(
            [judges[run.name], *run.training.monitor.rewards, *run.training.rewards]
        )
        for run in runs
    }
    rewards = registry.load(
        list(dict.fromkeys(name for names in looked_at.values() for name in names)),
        asked.models,
        asked.device,
        asked.settings.rewards,
    )
    for run in runs:
        found = walks(
            load_policy(
                pipeline,
                asked.weights,
                run,
                asked.seed,
                asked.device,
                find_start(run.training.start, asked.profile, asked.settings),
            ),
            run,
            [run.training.learning_rate * factor for factor in factors],
            updates,
            prompts,
            {name: rewards[name] for name in run.training.rewards},
            {name: rewards[name] for name in looked_at[run.name]},
            asked.prompts,
            asked.seed,
        )
        yield from tqdm(found, desc=run.name, total=len(factors), disable=None)


def _held_out(run: ResolvedRun) -> str:
    """Return the first monitored reward that an entry is not trained on; UserError without one."""
    training = run.training
    found = [each for each in training.monitor.rewards if each not in training.rewards]
    if not found:
        raise UserError(
            f"probe: --cliff: {run.name} trains on all of training.monitor.rewards: "
            "name a reward that it is not trained on with --judge"
        )
    return found[0]


def _print(walk: Walk) -> None:
    """Print a line for every held-out reward of a walk."""
    for number, (name, change) in enumerate(walk.changes.items()):
        first = f"{walk.method:14} {walk.rate:7.1e}  {walk.drift:7.4f}" if not number else " " * 31
        lost = "  lost" if change.lost else ""
        echo(f"{first}  {name:16} {change.mean:+9.4f} {change.error:7.4f}{lost}")


def _conclusion(every: Sequence[Walk], judge: str) -> str:
    """Say where an entry's cliff is, and which rate is a quarter of it."""
    edge, name = cliff(every, judge), every[0].method
    if edge is None:
        return f"{name}: no cliff in {judge} up to {every[-1].rate:.1e}: try higher --rates"
    if edge == every[0].rate:
        return f"{name}: {judge} is lost at every rate: try lower --rates"
    return (
        f"{name}: cliff at {edge:.1e}, where {judge} is lost; begin with a quarter, {edge / 4:.1e}"
    )
