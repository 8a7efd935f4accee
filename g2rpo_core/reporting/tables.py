"""The long table of comparisons: runs compared prompt by prompt, from the scores (`SCORES`).

The table is a study's results.parquet; docs/howto/studies.md describes its parts and columns. A
page shows it, report.json lists it, and what is inferred over seeds (`over_seeds.py`) has lines of
the same columns.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import combinations, permutations, product
from typing import Any

import numpy as np
import pandas as pd

from g2rpo_core.config.comparisons import TRAINING
from g2rpo_core.foundation.runs import run_name
from g2rpo_core.reporting.statistics import paired_difference

Line = Any  # a row of a table of comparisons, with its columns as attributes
Run = tuple[str, int]  # entry of the profile's `methods`, and seed
Variant = tuple[str, int]  # checkpoint, number of steps
Weights = Mapping[str, Mapping[str, float]]  # entry -> training reward -> weight
PARTS = (
    "run",
    "style",
    "pair",
    "matrix",
    "missing",
    "training",
    "warning",
    "learning",
    "seed",
    "prompt",
    "ceiling",
)
DTYPES = {
    **dict.fromkeys(
        ("part", "method", "checkpoint", "reward", "style", "against", "prompt_id", "note"),
        "string",
    ),
    **dict.fromkeys(("steps", "prompts", "missing", "pairs", "iteration"), "Int64"),
    **dict.fromkeys(
        ("value", "difference", "low", "high", "standard_error", "win_rate"), "float64"
    ),
}
RATIO_ERROR = "old_policy_ratio_error"


def tabulate(lines: Iterable[Mapping], about: Mapping) -> pd.DataFrame:
    """Return lines as one table, its first columns those of `DTYPES`; about: its attributes."""
    table = pd.DataFrame(list(lines))
    columns = dict.fromkeys(["part", "method", "seed", *DTYPES, *table.columns])
    table = table.reindex(columns=list(columns)).astype(DTYPES)
    table.attrs |= about
    return table


def lines_of(table: pd.DataFrame) -> list[Line]:
    """Return the rows of a table, with its columns as attributes."""
    return list(table.itertuples(index=False))


def arranged(table: pd.DataFrame, **orders: Iterable) -> pd.DataFrame:
    """Return a table sorted by columns, each in the order of the values given for it."""
    places = {
        name: {value: place for place, value in enumerate(order)} for name, order in orders.items()
    }
    place_of = lambda column: column.map(places[column.name])
    return table.sort_values(list(orders), kind="stable", key=place_of)


def part_of(table: pd.DataFrame, name: str) -> pd.DataFrame:
    """Return the lines of one part."""
    return table[table.part == name]


def keyed(table: pd.DataFrame, outer: str | list[str], inner: str) -> dict[Any, dict[str, Line]]:
    """Return lines by the values of some columns, such as their run, and then by one more."""
    return {
        key: {getattr(line, inner): line for line in lines_of(part)}
        for key, part in table.groupby(outer, sort=False)
    }


def by_run(lines: pd.DataFrame) -> dict[Run, dict[str, Line]]:
    """Return lines by run, and then by reward."""
    return keyed(lines, ["method", "seed"], "reward")


def judged(table: pd.DataFrame) -> pd.DataFrame:
    """Add two columns: `known`, whether a difference has an interval, and `tone`.

    That is `up` or `down` for a difference whose interval excludes zero, else empty: also where the
    interval is not known (NaN).
    """
    excludes_zero = (table.low > 0) | (table.high < 0)
    tone = np.where(excludes_zero, np.where(table.difference > 0, "up", "down"), "")
    return table.assign(known=table.low.notna(), tone=tone)


def standard_errors(line: Line) -> float:
    """Return a difference in units of its standard error; 0 if every pair is equal."""
    return line.difference / line.standard_error if line.standard_error else 0.0


def by_prompt(results: pd.DataFrame, run: Run, reward: str) -> pd.Series:
    """Return the scores of one run and reward, by prompt_id in sorted order."""
    chosen = results[
        (results.method == run[0]) & (results.seed == run[1]) & (results.reward == reward)
    ]
    return chosen.set_index("prompt_id").score.sort_index()


def difference(
    results: pd.DataFrame, treated: Run, control: Run, weights: Mapping[str, float]
) -> dict[str, float]:
    """Compute treated - control in the weighted sum of rewards, paired by prompt."""
    first, second = (_weighted(results, run, weights) for run in (treated, control))
    name = "/".join(map(str, (*treated, *control, *weights)))
    return paired_difference(first.to_numpy(), second.reindex(first.index).to_numpy(), name)


def _weighted(results: pd.DataFrame, run: Run, weights: Mapping[str, float]) -> pd.Series:
    """Return the weighted sum of rewards of one run, by prompt_id in sorted order."""
    return sum(weight * by_prompt(results, run, name) for name, weight in weights.items())


def run_lines(
    results: pd.DataFrame,
    bases: Mapping[Run, Run],
    rewards: Sequence[str],
    stats: Sequence[str],
    trained_on: Weights,
) -> Iterator[dict]:
    """Yield every run beside its base in every reward.

    Where its training rewards are known, also in their sum and in image statistics. bases: run ->
    the base that it is compared with; a base stands beside itself and has no difference.
    trained_on: lacks the bases, and is empty for published weights whose rewards are unknown.
    """
    for run, base in bases.items():
        about, on = {"part": "run", "method": run[0], "seed": run[1]}, trained_on.get(run[0])
        for reward in [*rewards, *(stats if on else ())]:
            scores = by_prompt(results, run, reward)
            mean = {"value": float(scores.mean()), "missing": int(scores.isna().sum())}
            gap = {} if run == base else difference(results, run, base, {reward: 1.0})
            yield about | {"reward": reward} | mean | gap
        if on:
            yield about | {"reward": TRAINING} | difference(results, run, base, on)


def pair_lines(
    results: pd.DataFrame, runs: Sequence[Run], rewards: Sequence[str], trained_on: Weights
) -> Iterator[dict]:
    """Yield every pair of methods with every shared seed, in each reward.

    Also in the training reward, if they share it.
    """
    methods = dict.fromkeys(method for method, _ in runs)
    seeds = dict.fromkeys(seed for _, seed in runs)
    for (first, second), seed in product(combinations(methods, 2), seeds):
        about = {"part": "pair", "method": first, "seed": seed, "against": second}
        shares = trained_on[first] == trained_on[second]
        measures = {TRAINING: trained_on[first]} if shares else {}
        measures |= {reward: {reward: 1.0} for reward in rewards}
        if {(first, seed), (second, seed)} <= {*runs}:
            for reward, weights in measures.items():
                gap = difference(results, (first, seed), (second, seed), weights)
                yield about | {"reward": reward} | gap


def matrix_lines(
    results: pd.DataFrame, runs: Sequence[Run], weights: Mapping[str, float]
) -> Iterator[dict]:
    """Yield every run against every other in the weighted sum that all were trained on.

    `against` names a run.
    """
    for run, other in permutations(runs, 2):
        about = {"part": "matrix", "method": run[0], "seed": run[1], "against": run_name(*other)}
        yield about | {"reward": TRAINING} | difference(results, run, other, weights)


def style_lines(
    results: pd.DataFrame, bases: Mapping[Run, Run], trained_on: Weights
) -> Iterator[dict]:
    """Yield runs beside their base in the training reward, for styles with two scored prompts."""
    for style, part in results.groupby("style", sort=True):
        for run, base in bases.items():
            on = trained_on[run[0]]
            if (_weighted(part, run, on) - _weighted(part, base, on)).notna().sum() > 1:
                about = {"part": "style", "method": run[0], "seed": run[1], "reward": TRAINING}
                of_style = {"style": style, "prompts": part.prompt_id.nunique()}
                yield about | of_style | difference(part, run, base, on)


def missing_lines(results: pd.DataFrame) -> list[dict]:
    """Count missing scores by run, checkpoint, steps and reward, with the most common reason."""
    keys = ["method", "seed", "checkpoint", "steps", "reward"]
    lacking = results[results.score.isna()].fillna({"reason": "unknown"}).groupby(keys).reason
    commonest = lacking.agg(lambda reasons: reasons.value_counts().idxmax())
    prompts = results.groupby(keys, sort=False).size().to_frame("prompts")
    lines = prompts.join(pd.DataFrame({"missing": lacking.size(), "note": commonest}), how="inner")
    return lines.reset_index().assign(part="missing").to_dict("records")


def training_lines(records: Mapping[Run, pd.DataFrame]) -> Iterator[dict]:
    """Yield each record with held-out rewards, and the last, of every run.

    What a report shows once for a run is in its last line: the largest ratio error, and the mean
    agreement of granularities.
    """
    for (method, seed), table in records.items():
        heldout = list(table.filter(like="heldout_"))
        over_all = table.filter(regex="^(correlation|gap)_").mean().to_dict()
        over_all |= table.filter([RATIO_ERROR]).max().to_dict()
        kept = table[table[heldout].notna().any(axis=1) | (table.index == table.index[-1])]
        columns = ["iteration", "num_forward_evals", "num_transitions", *heldout]
        lines = kept[columns].to_dict("records")
        lines[-1] |= over_all
        yield from ({"part": "training", "method": method, "seed": seed} | line for line in lines)


def changes(results: pd.DataFrame, run: Run, base: Run, weights: Mapping[str, float]) -> pd.Series:
    """Return how much each prompt's weighted sum rose from base to run, the worst first.

    By prompt_id; without prompts that lack a score.
    """
    rise = _weighted(results, run, weights) - _weighted(results, base, weights)
    return rise.dropna().sort_values(kind="stable")
