"""Inference over seeds or bases from lines of single runs: each seed's mean is one value."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations

import pandas as pd

from g2rpo_core.config.comparisons import TRAINING, Comparison
from g2rpo_core.foundation.runs import is_base
from g2rpo_core.reporting.measured import Compared
from g2rpo_core.reporting.statistics import (
    CONFIDENCE,
    holm,
    pooled_half_width,
    sign_flip,
    spread,
    student,
)
from g2rpo_core.reporting.tables import Line, arranged, judged, keyed, lines_of

FEWEST = 3  # seeds with an interval: two values are too few for a spread
COLUMNS = ["method", "reward", "value", "seeds", "by_seed", "difference", "low", "high"]


@dataclass(frozen=True)
class Group:
    """Methods that share a training reward."""

    names: Sequence[str]
    weights: Mapping[str, float]
    """Of rewards, in the training reward."""
    variants: list[dict[str, Line]]
    """By checkpoint and number of steps: the gains of methods with enough seeds, highest first."""
    above: dict[str, dict[str, Line]]
    """Each of these methods against each other, paired by seed: method -> other -> line."""
    pooled: float | None
    """As `pooled_difference`."""

    @property
    def ranked(self) -> list[Line]:
        """Return the gains at the reported checkpoint and number of steps, the highest first."""
        return list(self.variants[0].values())


@dataclass(frozen=True)
class Gains:
    """Methods over their seeds: beside the base, beside each other, and as preregistered."""

    lines: pd.DataFrame
    """Of every seed: in the training reward, then in every reward, method by method."""
    table: pd.DataFrame
    """As `over_seeds`."""
    groups: list[Group]
    preregistered: list[Line]

    @property
    def trained(self) -> pd.DataFrame:
        """Return the gains over seeds in the training reward, the highest first."""
        return _ranked(self.table[self.table.reward == TRAINING])

    @property
    def best(self) -> dict[str, int]:
        """Return each method's seed with the highest gain, the best method first."""
        seeds = _ranked(self.lines[self.lines.reward == TRAINING]).drop_duplicates("method")
        return seeds.set_index("method").seed[self.trained.method].to_dict()

    @property
    def by_method(self) -> dict[str, dict[str, Line]]:
        """Return the lines over seeds of every method, by reward."""
        return keyed(self.table, "method", "reward")


def compare_over_seeds(compared: Compared, variants: Sequence[pd.DataFrame]) -> Gains:
    """Compare methods over seeds: with the base, with each other, and as a study preregistered.

    variants: the lines of runs at each checkpoint and number of steps, with the columns of
    `tables.judged`.
    """
    rewards = [TRAINING, *compared.settings.evaluation.rewards]
    lines = variants[0][~variants[0].method.map(is_base) & variants[0].reward.isin(rewards)]
    lines = arranged(lines, method=dict.fromkeys(lines.method), reward=rewards)
    return Gains(
        lines=lines,
        table=over_seeds(lines),
        groups=[
            compare_group(compared.weights[names[0]], names, variants) for names in compared.groups
        ],
        preregistered=lines_of(preregistered(lines, compared.comparisons)),
    )


def over_seeds(lines: pd.DataFrame) -> pd.DataFrame:
    """Return each method's and reward's mean over its lines (`tables.judged`), one per seed.

    The interval is Student's t; NaN below three seeds. `seeds` counts them, `by_seed` has their
    differences in rising order, and `tone` is that of the interval; without one, that which every
    seed has.
    """
    groups = lines.groupby(["method", "reward"], sort=False)
    rows = [
        {"method": method, "reward": reward, "value": seeds.value.mean(), "seeds": len(seeds)}
        | {"by_seed": sorted(seeds.difference), **spread(seeds.difference, fewest=FEWEST)}
        for (method, reward), seeds in groups
    ]
    tones = [set(seeds.tone) for _, seeds in groups]
    table = judged(pd.DataFrame(rows, columns=COLUMNS))
    alike = [seen.pop() if len(seen) == 1 else "" for seen in tones]
    return table.assign(tone=table.tone.where(table.known, alike))


def compare_group(
    weights: Mapping[str, float], methods: Sequence[str], variants: Sequence[pd.DataFrame]
) -> Group:
    """Compare methods with one training reward; variants: as in `compare_over_seeds`."""
    trained = [lines[lines.method.isin(methods) & (lines.reward == TRAINING)] for lines in variants]
    gains = [over_seeds(lines).query("seeds >= @FEWEST") for lines in trained]
    ranked = [{line.method: line for line in lines_of(_ranked(lines))} for lines in gains]
    by_seed = gains_by_seed(trained[0])
    pairs = between(by_seed, list(gains[0].method))
    return Group(
        names=methods,
        weights=weights,
        variants=ranked,
        above={
            name: {line.against: line for line in lines_of(pairs[pairs.method == name])}
            for name in ranked[0]
        },
        pooled=pooled_difference(by_seed[list(ranked[0])].dropna(how="all")),
    )


def _ranked(gains: pd.DataFrame) -> pd.DataFrame:
    return gains.sort_values("difference", ascending=False, kind="stable")


def gains_by_seed(lines: pd.DataFrame, reward: str = TRAINING) -> pd.DataFrame:
    """Return runs' gains in one reward: seeds x methods, NaN where there is no run."""
    return lines[lines.reward == reward].pivot(index="seed", columns="method", values="difference")


def between(gains: pd.DataFrame, methods: Sequence[str]) -> pd.DataFrame:
    """Return every method against every other one in the training reward, paired by seed.

    gains: as `gains_by_seed`.
    """
    rows = [
        {"method": method, "against": other, "reward": TRAINING}
        | spread((gains[method] - gains[other]).dropna())
        for method, other in permutations(methods, 2)
    ]
    columns = ["method", "against", "reward", "difference", "low", "high"]
    return judged(pd.DataFrame(rows, columns=columns))


def pooled_difference(gains: pd.DataFrame) -> float | None:
    """Return half of the 95 % interval of a difference between two methods, by pooled variance.

    gains: as `gains_by_seed`. None unless at least four methods have the same three to five seeds:
    few seeds, many comparisons.
    """
    fits = gains.shape[1] >= 4 and 3 <= len(gains) <= 5 and gains.notna().all(axis=None)
    return pooled_half_width(gains.to_numpy().T) if fits else None


def preregistered(lines: pd.DataFrame, comparisons: Sequence[Comparison]) -> pd.DataFrame:
    """Return the preregistered comparisons, over two or more seeds or bases that both entries have.

    With a primary one, that is judged at 5 %, the secondary one at 5 % if the primary holds, and
    all others by Holm, each by its `test`. Without, all have joint intervals: by Bonferroni, all of
    them contain the true differences in 95 % of studies.

    Columns: those of `Comparison` (level 0 for none), and difference, low, high: the interval by
    which it is judged, of two one-sided tests for a level. `p` is two-sided, of Student's t for the
    mean being minus the margin, not adjusted; of a level, the larger of both one-sided ones. `holm`
    is adjusted for all of its role. `exact` and `exact_holm` are the same by sign flips, and
    `smallest` is the least that `exact` can be with as many values. `holds`: whether the whole
    interval is above minus the margin, or within ± the level, and with Holm whether `holm` is below
    5 %; by the exact test whether the mean is there, and `exact_holm` below 5 %.
    """
    tested: list[tuple[Comparison, list[float]]] = []
    for each in comparisons:
        both = gains_by_seed(lines, each.reward).reindex(columns=[each.method, each.against])
        gaps = (both[each.method] - both[each.against]).dropna().tolist()
        tested += [(each, gaps)] if len(gaps) > 1 else []
    # What is judged together, and how
    staged = any(each.role == "primary" for each in comparisons)
    error = 1 - CONFIDENCE if staged else (1 - CONFIDENCE) / max(1, len(comparisons))
    rows = [
        each.model_dump()
        | spread(gaps, 1 - (2 * error if each.level else error))
        | {"p": _p_value(each, gaps, student), "exact": _p_value(each, gaps, sign_flip)}
        | {"smallest": (1 if each.level else 2) / 2 ** len(gaps)}
        for each, gaps in tested
    ]
    columns = [*Comparison.model_fields, "difference", "low", "high", "p", "exact", "smallest"]
    table = judged(pd.DataFrame(rows, columns=columns).fillna({"level": 0.0}))
    others = table.role == "other"
    for alone, adjusted in (("p", "holm"), ("exact", "exact_holm")):
        table[adjusted] = table[alone]
        table.loc[others, adjusted] = holm(table[alone][others].tolist())
    # The whole interval decides, or the exact test and the side of the mean
    exact = table.test == "exact"
    low, high = (table[end].mask(exact, table.difference) for end in ("low", "high"))
    within = (-table.level < low) & (high < table.level)
    inside = within.where(table.level > 0, low > -table.margin)
    adjusted = table.holm.mask(exact, table.exact_holm)
    table["holds"] = inside & (not staged or adjusted < 1 - CONFIDENCE)
    # The secondary one counts only if the primary holds
    if staged and not table.holds[table.role == "primary"].any():
        table.loc[table.role == "secondary", "holds"] = False
    return table


def _p_value(comparison: Comparison, values: list[float], test: Callable[..., float]) -> float:
    """Return a comparison's two-sided p-value; of a level, the larger one of two one-sided tests.

    test: `student` or `sign_flip`.
    """
    if not comparison.level:
        return test(values, -comparison.margin)
    low, high = -comparison.level, comparison.level
    return max(test(values, low, "greater"), test(values, high, "less"))
