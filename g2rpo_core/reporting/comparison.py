"""Compare two evaluations: the settings that differ, and each run's rewards, with significance."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product

import numpy as np
import pandas as pd

from g2rpo_core.foundation.errors import UserError
from g2rpo_core.foundation.profiles import leaves
from g2rpo_core.foundation.runs import BASE, run_name
from g2rpo_core.reporting.over_seeds import over_seeds
from g2rpo_core.reporting.statistics import paired_difference
from g2rpo_core.reporting.tables import Run, arranged, by_prompt, judged

SAME = 1e-9  # how far two means of the same scores may be apart
DECIDING = ("prompts", "evaluation")  # sections that decide prompts and their noise


@dataclass(frozen=True)
class Side:
    """One side of a comparison."""

    name: str
    profile: Mapping[str, object]
    """Resolved, as the stage `profile` writes it."""
    results: pd.DataFrame
    """The rows of its evaluations (`SCORES`) that reports use."""

    @property
    def runs(self) -> list[Run]:
        return list(dict.fromkeys(zip(self.results.method, self.results.seed)))

    @property
    def means_only(self) -> bool:
        """Return whether it has means in place of scores by prompt."""
        return bool(self.results.prompt_id.isna().any())


def changed_settings(before: Side, after: Side) -> list[tuple[str, object, object]]:
    """Return the dotted keys whose values differ, with both values; None for a missing key.

    Of `methods`, only entries that both sides have.
    """
    ours, theirs = (
        {key: value for key, value in leaves(side.profile).items() if value != {}}
        for side in (before, after)
    )
    shared = {method for method, _ in before.runs} & {method for method, _ in after.runs}
    keys = [
        key
        for key in dict.fromkeys([*ours, *theirs])
        if not key.startswith("methods.") or key.split(".")[1] in shared
    ]
    return [
        (key, ours.get(key), theirs.get(key)) for key in keys if ours.get(key) != theirs.get(key)
    ]


def changes(before: Side, after: Side) -> pd.DataFrame:
    """Return each method's and reward's change over shared seeds and prompts.

    UserError if nothing is shared. Columns: those of `over_seeds`, of after - before paired by
    prompt; `value` is the mean after, `before` that before; `intervals` has (low, high) of the mean
    over seeds or, with fewer than three, of each seed.
    """
    shared = [run for run in before.runs if run in after.runs]
    if not shared:
        raise UserError(
            f"compare: {before.name} and {after.name} have no run in common: "
            f"{_named(before.runs)} against {_named(after.runs)}"
        )
    sides = _alike(before, after)
    rewards = [name for name in dict.fromkeys(sides[0].reward) if name in set(sides[1].reward)]
    lines = []
    for run, reward in product(shared, rewards):
        first, second = (by_prompt(side, run, reward) for side in sides)
        if len(first) and len(second):
            name = "/".join(map(str, ("compare", *run, reward)))
            gap = paired_difference(second.reindex(first.index).to_numpy(), first.to_numpy(), name)
            about = {"method": run[0], "seed": run[1], "reward": reward, **gap}
            lines.append(about | {"before": first.mean(), "value": second.mean()})
    # Method by method, over its seeds
    columns = ["method", "seed", "reward", "before", "value", "difference", "low", "high"]
    table = pd.DataFrame(lines, columns=columns)
    table = arranged(judged(table), method=dict.fromkeys(table.method), reward=rewards)
    of_seeds = table.groupby(["method", "reward"], sort=False)
    whole = over_seeds(table)
    intervals = [
        list(zip(seeds.low, seeds.high)) if math.isnan(low) else [(low, high)]
        for low, high, (_, seeds) in zip(whole.low, whole.high, of_seeds)
    ]
    return whole.assign(before=of_seeds.before.mean().to_numpy(), intervals=intervals)


def _alike(before: Side, after: Side) -> list[pd.DataFrame]:
    """Return both results on shared prompts; as means if one of them has no scores by prompt.

    UserError if they share no prompts. Means do not tell their prompts: these count as the same if
    the settings of prompts and evaluation are equal, or the base's means.
    """
    sides = [before.results, after.results]
    if before.means_only or after.means_only:
        keys = ["method", "seed", "reward"]
        sides = [
            side.groupby(keys, sort=False).score.mean().reset_index().assign(prompt_id="all")
            for side in sides
        ]
        base = [side[side.method == BASE[0]].set_index("reward").score for side in sides]
        shared = base[0].index.intersection(base[1].index)
        settings = [[side.profile.get(name) for name in DECIDING] for side in (before, after)]
        alike = settings[0] == settings[1] and any(settings[0])
        same = len(shared) and (
            alike or np.allclose(base[0][shared], base[1][shared], rtol=0, atol=SAME)
        )
    else:
        prompts = set(sides[0].prompt_id) & set(sides[1].prompt_id)
        sides = [side[side.prompt_id.isin(prompts)] for side in sides]
        same = bool(prompts)
    if not same:
        raise UserError(
            f"compare: {before.name} and {after.name} were evaluated on different prompts, "
            "so nothing can be paired"
        )
    return sides


def _named(runs: list[Run]) -> str:
    return ", ".join(run_name(*run) for run in runs)
