"""Computes the tables of a report: means and paired differences, from the scores by prompt (`SCORES`)."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations
from types import MappingProxyType

import numpy as np
import pandas as pd

from g2rpo_core.config.comparisons import TRAINING, Comparison
from g2rpo_core.foundation.runs import is_base
from g2rpo_core.reporting.statistics import (
    CONFIDENCE,
    Difference,
    Spread,
    compared,
    holm,
    pooled_half_width,
    sign_flip,
    spread,
    student,
)

Run = tuple[str, int]  # entry of the profile's `methods`, and seed
Weights = Mapping[str, Mapping[str, float]]  # entry -> the rewards that it was trained on, with their weights


@dataclass(frozen=True)
class Cell:
    """One reward of one run."""

    mean: float
    """Over prompts."""
    missing: int
    """How many scores are missing."""
    difference: Difference | None
    """From the base, paired by prompt; None for the base itself."""


@dataclass(frozen=True)
class Row:
    """One run in all rewards."""

    method: str
    seed: int
    cells: dict[str, Cell]
    """By reward."""
    trained: Difference | None
    """From the base, in the training reward: the weighted sum that training maximizes; None where it is not known."""


@dataclass(frozen=True)
class OverSeeds:
    """The difference of one method in one reward, from something else, with each seed."""

    method: str
    reward: str | None
    """None for the method's training reward."""
    seeds: dict[int, Difference]
    """The difference of each seed, over prompts."""

    @property
    def by(self) -> float:
        """Return the mean over seeds."""
        return sum(difference.mean for difference in self.seeds.values()) / len(self.seeds)

    @cached_property
    def over_seeds(self) -> Spread | None:
        """Return the mean over seeds with its interval, if there are at least three."""
        return spread([difference.mean for difference in self.seeds.values()]) if len(self.seeds) > 2 else None

    @property
    def tone(self) -> str:
        """Return the tone of the interval over seeds; without one, that which every seed has, or none if they differ."""
        tones = {tone(each) for each in ([self.over_seeds] if self.over_seeds else self.seeds.values())}
        return tones.pop() if len(tones) == 1 else ""


@dataclass(frozen=True)
class Gain(OverSeeds):
    """How far one method is above the base in one reward."""

    mean: float | None
    """Of the reward itself; None for a training reward."""


@dataclass(frozen=True)
class Pair:
    """Two methods compared with the same seed in one reward."""

    first: str
    second: str
    seed: int
    reward: str | None
    """None for the training reward."""
    difference: Difference


@dataclass(frozen=True)
class StyleRow:
    """One run on the prompts of one style."""

    method: str
    seed: int
    style: str
    prompts: int
    """How many."""
    trained: Difference
    """From the base, in the training reward."""


@dataclass(frozen=True)
class Standing:
    """One method over its seeds."""

    method: str
    gain: Spread
    """Over the base, in the training reward."""
    held_out: dict[str, Spread]
    """Gains over the base in rewards that no method was trained on."""
    above: dict[str, Spread]
    """How far it is above each other method in the training reward, paired by seed."""


def by_prompt(results: pd.DataFrame, run: Run, reward: str) -> pd.Series:
    """Return the scores of one run and reward, by prompt_id in sorted order."""
    chosen = results[(results.method == run[0]) & (results.seed == run[1]) & (results.reward == reward)]
    return chosen.set_index("prompt_id").score.sort_index()


def difference(results: pd.DataFrame, treated: Run, control: Run, weights: Mapping[str, float]) -> Difference:
    """Compute treated - control in the weighted sum of rewards, paired by prompt."""
    first, second = (_weighted(results, run, weights) for run in (treated, control))
    name = "/".join(map(str, (*treated, *control, *weights)))
    return compared(first.to_numpy(), second.reindex(first.index).to_numpy(), name)


def _weighted(results: pd.DataFrame, run: Run, weights: Mapping[str, float]) -> pd.Series:
    """Return the weighted sum of rewards of one run, by prompt_id in sorted order."""
    first, *others = (weight * by_prompt(results, run, reward) for reward, weight in weights.items())
    return sum(others, first)


def main_table(
    results: pd.DataFrame,
    base: Run,
    runs: list[Run],
    rewards: list[str],
    trained_on: Weights,
    bases: Mapping[str, str] = MappingProxyType({}),
) -> list[Row]:
    """Return the paper's Table 1: the base and every run against every reward, with differences from the base paired by prompt.

    results: columns method, seed, prompt_id, reward, score, as the stage `evaluate` writes them; trained_on: empty for the base, and
    for published weights whose training rewards are unknown; bases: entry -> the name of the base as it is drawn, where that is
    another than `base`; these follow it as rows of their own.
    """
    of = lambda method: base_of(method, base, bases)
    return [
        Row(
            *run,
            cells(results, of(run[0]), run, rewards),
            difference(results, run, of(run[0]), trained_on[run[0]]) if trained_on.get(run[0]) else None,
        )
        for run in [*dict.fromkeys([base, *map(of, bases)]), *runs]
    ]


def base_of(method: str, base: Run, bases: Mapping[str, str]) -> Run:
    """Return the base that an entry's runs are compared with; bases: as in `main_table`."""
    return (method if is_base(method) else bases.get(method, base[0]), base[1])


def cells(results: pd.DataFrame, base: Run, run: Run, rewards: list[str]) -> dict[str, Cell]:
    """Return the cell of one run for each reward or image statistic."""
    row_cells = {}
    for reward in rewards:
        scores = by_prompt(results, run, reward)
        to_base = None if run == base else difference(results, run, base, {reward: 1.0})
        row_cells[reward] = Cell(float(scores.mean()), int(scores.isna().sum()), to_base)
    return row_cells


def method_pairs(results: pd.DataFrame, runs: list[Run], rewards: list[str], trained_on: Weights) -> list[Pair]:
    """Return every pair of methods, for every seed that both have: the training reward first (if they share it), then each reward."""
    methods = list(dict.fromkeys(method for method, _ in runs))
    return [
        Pair(first, second, seed, reward, difference(results, (first, seed), (second, seed), weights))
        for first, second in combinations(methods, 2)
        for seed in dict.fromkeys(seed for _, seed in runs)
        if (first, seed) in runs and (second, seed) in runs
        for reward, weights in [
            *([(None, trained_on[first])] if trained_on[first] == trained_on[second] else []),
            *((reward, {reward: 1.0}) for reward in rewards),
        ]
    ]


def gains(rows: list[Row], rewards: list[str]) -> list[Gain]:
    """Return the gains of every method, in the rows' order: in its training reward and in every reward."""
    gained = []
    for method in dict.fromkeys(row.method for row in rows):
        of_method = [row for row in rows if row.method == method]
        for reward in (None, *rewards):
            all_seeds = {row.seed: row.trained if reward is None else row.cells[reward].difference for row in of_method}
            seeds = {seed: difference for seed, difference in all_seeds.items() if difference is not None}
            if seeds:
                mean = None if reward is None else sum(row.cells[reward].mean for row in of_method) / len(of_method)
                gained.append(Gain(method, reward, seeds, mean))
    return gained


def standings(rows: list[Row], methods: list[str], held_out: list[str]) -> list[Standing]:
    """Return the standings of methods that share a training reward, the highest gain first.

    Methods with fewer than three seeds are left out. held_out: rewards that no method was trained on. Each seed is one value, its
    mean over prompts; two values are too few for a spread.
    """
    runs = {method: {row.seed: row for row in rows if row.method == method} for method in methods}
    runs = {method: seeds for method, seeds in runs.items() if len(seeds) > 2}

    def above(method: str, other: str) -> Spread:
        return spread([_gain(runs[method][seed]) - _gain(runs[other][seed]) for seed in runs[method] if seed in runs[other]])

    standing = [
        Standing(
            method,
            spread([_gain(row) for row in seeds.values()]),
            {name: spread([_gain(row, name) for row in seeds.values()]) for name in held_out},
            {other: above(method, other) for other in runs if other != method},
        )
        for method, seeds in runs.items()
    ]
    return sorted(standing, key=lambda each: -each.gain.mean)


def _gain(row: Row, reward: str = TRAINING) -> float:
    """Return the gain of one run over the base, in the training reward or in one reward."""
    difference = row.trained if reward == TRAINING else row.cells[reward].difference
    assert difference, "the base has no gain over itself"
    return difference.mean


@dataclass(frozen=True)
class Preregistered:
    """The result of a comparison that was registered before the runs."""

    comparison: Comparison
    difference: Spread
    """Over seeds or bases, with the interval by which it is judged; of two one-sided tests if both are expected level."""
    holds: bool
    """Whether the whole interval is above minus the margin, or within ± the level; with Holm, whether the adjusted p-value is below 5 %."""
    p: float
    """Two-sided, of Student's t for the mean being minus the margin; not adjusted. Of a level, the larger of both one-sided ones."""
    holm: float
    """The same, adjusted for all of its role."""
    exact: float
    """As `p`, by sign flips; at best 2 / 2^n."""


def compare_preregistered(rows: list[Row], comparisons: Sequence[Comparison]) -> list[Preregistered]:
    """Return the results of a study's comparisons, each over the seeds (or bases) that both entries have, at least two.

    With a primary one, that is judged at 5 %, the secondary one at 5 % if the primary holds, and all others by Holm. Without, all have
    joint intervals: by Bonferroni, all of them contain the true differences in 95 % of studies.
    """
    runs = {(row.method, row.seed): row for row in rows}
    found: list[tuple[Comparison, list[float]]] = []
    for asked in comparisons:
        seeds = [seed for method, seed in runs if method == asked.method and (asked.against, seed) in runs]
        pairs = [(runs[asked.method, seed], runs[asked.against, seed]) for seed in seeds]
        values = [_gain(row, asked.reward) - _gain(against, asked.reward) for row, against in pairs]
        if len(values) > 1:
            found.append((asked, values))
    # What is judged together, and how
    staged = any(asked.role == "primary" for asked in comparisons)
    together = [number for number, (asked, _) in enumerate(found) if asked.role == "other"]
    p_values = [_p_value(asked, values, student) for asked, values in found]
    adjusted = list(p_values)
    for number, value in zip(together, holm([p_values[number] for number in together])):
        adjusted[number] = value
    results = []
    for number, (asked, values) in enumerate(found):
        error = 1 - CONFIDENCE if staged else (1 - CONFIDENCE) / max(1, len(comparisons))
        difference = spread(values, 1 - (2 * error if asked.level else error))
        inside = (
            -asked.level < difference.low and difference.high < asked.level if asked.level else difference.low > -asked.margin
        )
        holds = inside and (not staged or adjusted[number] < 1 - CONFIDENCE)
        exact = _p_value(asked, values, sign_flip)
        results.append(Preregistered(asked, difference, holds, p_values[number], adjusted[number], exact))
    # The secondary one counts only if the primary holds
    if staged and not any(one.holds for one in results if one.comparison.role == "primary"):
        results = [replace(one, holds=False) if one.comparison.role == "secondary" else one for one in results]
    return results


def _p_value(asked: Comparison, values: list[float], test: Callable[[Sequence[float], float], float]) -> float:
    """Return the p-value of a comparison by a two-sided test of (values, mean); of a level, of two one-sided tests."""
    if not asked.level:
        return test(values, -asked.margin)
    mean = sum(values) / len(values)
    one_sided = lambda p, inside: p / 2 if inside else 1 - p / 2
    low, high = -asked.level, asked.level
    return max(one_sided(test(values, low), mean > low), one_sided(test(values, high), mean < high))


def pooled_difference(rows: list[Row], methods: Sequence[str]) -> float | None:
    """Return half of the 95 % interval of a difference between two methods with one variance for all.

    None unless at least four methods have the same three to five seeds: few seeds, many comparisons.
    """
    gained = {method: {row.seed: _gain(row) for row in rows if row.method == method} for method in methods}
    seeds = {tuple(sorted(each)) for each in gained.values()}
    if len(gained) < 4 or len(seeds) > 1 or not 3 <= len(*seeds) <= 5:
        return None
    return pooled_half_width(np.array([[each[seed] for seed in min(seeds)] for each in gained.values()]))


def missing_table(results: pd.DataFrame) -> list[dict]:
    """Count missing scores: one line per run, checkpoint, number of steps and reward that lacks some, with the most common reason."""
    keys = ["method", "seed", "checkpoint", "steps", "reward"]
    lines = []
    for key, part in results.groupby(keys, sort=False):
        lacking = part[part.score.isna()]
        if len(lacking):
            reason = lacking.reason.fillna("unknown").value_counts().idxmax()
            lines.append(dict(zip(keys, key)) | {"missing": len(lacking), "scores": len(part), "reason": reason})
    return lines


def win_rates(results: pd.DataFrame, runs: list[Run], weights: Mapping[str, float]) -> list[list[Difference | None]]:
    """Return the paired difference of every run (row) to every other (column) in a weighted sum; None on the diagonal."""
    return [[None if one == other else difference(results, one, other, weights) for other in runs] for one in runs]


def style_table(
    results: pd.DataFrame, base: Run, runs: list[Run], trained_on: Weights, bases: Mapping[str, str] = MappingProxyType({})
) -> list[StyleRow]:
    """Compare runs with the base in the training reward, style by style; where fewer than two prompts have scores of both, not.

    bases: as in `main_table`.
    """
    rows = []
    for style, part in results.groupby("style", sort=True):
        for run in runs:
            on, its_base = trained_on[run[0]], base_of(run[0], base, bases)
            if (_weighted(part, run, on) - _weighted(part, its_base, on)).notna().sum() > 1:
                rows.append(StyleRow(*run, style, part.prompt_id.nunique(), difference(part, run, its_base, on)))
    return rows


def most_changed(results: pd.DataFrame, run: Run, base: Run, weights: Mapping[str, float], count: int) -> list[tuple[str, float]]:
    """Return the prompts whose weighted sum fell most from the base to a run: (prompt_id, difference), the worst first."""
    total = lambda each: _weighted(results, each, weights)
    return list((total(run) - total(base)).dropna().nsmallest(count).items())


def tone(difference: Difference | Spread | None) -> str:
    """Return `up` or `down` for a difference whose interval excludes zero, else nothing."""
    # Written so that an interval that is not known (NaN) is not significant
    if difference is None or not (difference.low > 0 or difference.high < 0):
        return ""
    return "up" if difference.mean > 0 else "down"
