"""Compares two evaluations: which settings differ, how far the rewards of each run differ, and whether that is significant."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import pandas as pd

from g2rpo_core.common.runs import run_name
from g2rpo_core.errors import UserError
from g2rpo_core.reporting.statistics import Difference, Spread, paired_difference, spread
from g2rpo_core.reporting.tables import Run, by_prompt, tone


@dataclass(frozen=True)
class Side:
    """One side of a comparison: its name, its resolved profile, and the rows of its evaluations (`SCORES`) that reports use."""

    name: str
    profile: Mapping[str, object]
    results: pd.DataFrame

    @property
    def runs(self) -> list[Run]:
        return list(self.results[["method", "seed"]].drop_duplicates().itertuples(index=False, name=None))


@dataclass(frozen=True)
class Change:
    """The change of one method in one reward, after - before, paired by prompt: per seed, and the mean of three seeds or more."""

    method: str
    reward: str
    before: float
    after: float
    seeds: dict[int, Difference]
    over_seeds: Spread | None

    @property
    def tone(self) -> str:
        """`up` or `down` if it is significant (over seeds, or on every seed), else empty."""
        tones = {tone(one) for one in ([self.over_seeds] if self.over_seeds else self.seeds.values())}
        return tones.pop() if len(tones) == 1 else ""


def changed_settings(before: Side, after: Side) -> list[tuple[str, object, object]]:
    """The dotted keys whose values differ, with both values (None if a profile lacks the key).

    Methods count only if both sides have them.
    """
    ours, theirs = dict(_leaves(before.profile)), dict(_leaves(after.profile))
    shared = {method for method, _ in before.runs} & {method for method, _ in after.runs}
    keys = [key for key in dict.fromkeys([*ours, *theirs]) if not key.startswith("methods.") or key.split(".")[1] in shared]
    return [(key, ours.get(key), theirs.get(key)) for key in keys if ours.get(key) != theirs.get(key)]


def _leaves(data: object, prefix: str = "") -> Iterator[tuple[str, object]]:
    if not isinstance(data, Mapping):
        yield prefix, data
        return
    for key, value in data.items():
        yield from _leaves(value, f"{prefix}.{key}" if prefix else str(key))


def changes(before: Side, after: Side) -> list[Change]:
    """The change of every method and reward that both have, over shared seeds and prompts.

    UserError if they share no run or prompts.
    """
    shared = [run for run in before.runs if run in after.runs]
    if not shared:
        raise UserError(
            f"compare: {before.name} and {after.name} have no run in common: {_named(before.runs)} against {_named(after.runs)}"
        )
    prompts = set(before.results.prompt_id) & set(after.results.prompt_id)
    if len(prompts) < 2:
        raise UserError(f"compare: {before.name} and {after.name} were evaluated on different prompts, so nothing can be paired")
    sides = [side.results[side.results.prompt_id.isin(prompts)] for side in (before, after)]
    rewards = [name for name in dict.fromkeys(sides[0].reward) if name in set(sides[1].reward)]
    found = []
    for method in dict.fromkeys(method for method, _ in shared):
        for reward in rewards:
            seeds, means = {}, []
            for run in (run for run in shared if run[0] == method):
                first, second = (by_prompt(side, run, reward) for side in sides)
                if len(first) > 1 and len(second) > 1:
                    name = "/".join(map(str, ("compare", *run, reward)))
                    seeds[run[1]] = paired_difference(second.reindex(first.index).to_numpy(), first.to_numpy(), name)
                    means.append((float(first.mean()), float(second.mean())))
            if seeds:
                over = spread([one.mean for one in seeds.values()]) if len(seeds) > 2 else None
                was, now = (sum(column) / len(means) for column in zip(*means))
                found.append(Change(method, reward, was, now, seeds, over))
    return found


def _named(runs: list[Run]) -> str:
    return ", ".join(run_name(*run) for run in runs)
