"""What a report concludes, as plain values, and the paper's numbers beside runs with its settings.

The templates make sentences of it (`templates/sentences.j2`).
"""

from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from statistics import mean
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
from ruamel.yaml import YAML

from g2rpo_core.config.comparisons import TRAINING
from g2rpo_core.config.profile import ResolvedRun
from g2rpo_core.reporting.measured import Compared
from g2rpo_core.reporting.over_seeds import Gains
from g2rpo_core.reporting.tables import Line, Variant, by_run, lines_of

PAPER = YAML(typ="safe", pure=True).load(Path(__file__).with_name("paper.yaml").read_text())


def conclude(
    compared: Compared, table: pd.DataFrame, gains: Gains, granularities: Sequence[Mapping]
) -> dict[str, Any]:
    """Conclude from the table of comparisons (`tables.judged`); granularities: of `show_training`.

    Returns `trained`, lines over seeds in the training reward, the highest gain first; `lead`, as
    `lead_of`; `seed_by_seed`, of a method and what it is compared with, the base first, a line for
    each seed; `sums`, as `worth_of_sums`.
    """
    trained = lines_of(gains.trained)
    pairs = table[(table.part == "pair") & (table.reward == TRAINING)]
    alone = gains.lines[gains.lines.reward == TRAINING]
    alone = alone.assign(against=alone.method.map(compared.bases_of))
    singles = pd.concat([alone, pairs]) if compared.few else alone
    together = singles.groupby(["method", "against"], sort=False)
    return {
        "trained": trained,
        "lead": lead_of([line.method for line in trained[:2]], lines_of(pairs)),
        "seed_by_seed": {both: lines_of(lines) for both, lines in together},
        "sums": worth_of_sums(granularities),
    }


def lead_of(highest: Sequence[str], pairs: Sequence[Line]) -> dict[str, Any] | None:
    """Return how far the first method is before the second; None if no line has both.

    pairs: of runs with one seed, in their training reward. `by` is the mean over seeds of the first
    minus the second, `ahead` the seeds on which it is significantly above over prompts, and
    `half_width` half of a seed's 95 % interval, the widest; None where none is known.
    """
    shared = [line for line in pairs if {line.method, line.against} == {*highest}]
    if not shared:
        return None
    sign = 1 if shared[0].method == highest[0] else -1
    widths = [(line.high - line.low) / 2 for line in shared if line.known]
    return {
        "first": highest[0],
        "second": highest[1],
        "by": mean(sign * line.difference for line in shared),
        "ahead": sum(line.tone == ("up" if sign > 0 else "down") for line in shared),
        "seeds": len(shared),
        "half_width": max(widths, default=None),
    }


def worth_of_sums(
    granularities: Sequence[Mapping],
) -> dict[str, tuple[float, float, dict[str, float]]]:
    """Return what each method's sum of granularities is worth (`worth_of_sum`), and why.

    That is the mean correlation of each coarser granularity with the finest. Methods with one that
    is not positive, or not known, are left out. granularities: of `show_training`.
    """
    lines = pd.DataFrame(granularities, columns=["method", "granularity", "correlation"])
    return {
        method: (*worth_of_sum(alike.to_list()), alike.to_dict())
        for method, of_method in lines.groupby("method", sort=False)
        if (alike := of_method.groupby("granularity", sort=False).correlation.mean()).gt(0).all()
    }


def worth_of_sum(correlations: Sequence[float]) -> tuple[float, float]:
    """Return the effective sample size of a sum of granularities, in samples of the finest alone.

    By (sum k)^2 / (1^T R 1), docs/explanation/granularities.md. correlations: of each coarser
    granularity's rewards with the finest's, in (0, 1]; two coarser ones correlate as both do with
    the finest, by the product. The first value is for what the finest tail's reward measures; the
    second is for a quality that all measure equally well, and is the largest.
    """
    with_finest = np.array([1.0, *correlations])
    among = np.outer(with_finest, with_finest)
    np.fill_diagonal(among, 1)
    return with_finest.sum() ** 2 / among.sum(), len(among) ** 2 / among.sum()


def paper_rows(compared: Compared, variants: Mapping[Variant, pd.DataFrame]) -> list[dict]:
    """Pair our runs with the paper's rows of the same method and rewards; None where it has none.

    Columns are those of `evaluation.rewards`. `unlike` lists the settings that are not the paper's;
    only if it is empty may the two be compared.
    """
    settings, evaluation = compared.settings, compared.settings.evaluation
    # Of weights that were trained elsewhere, the paper's method is known, and no settings
    theirs = {name: settings.published[name].method or name for name in compared.published}
    theirs |= {name: entry.published for name, entry in compared.entries.items()}
    ours = set(evaluation.steps) if len(evaluation.steps) > 1 else set()
    named = {name for table in PAPER["tables"] for name in table["rows"]}
    rows = []
    for number, ((_, steps), runs) in enumerate(variants.items()):
        # The paper's table for our steps; the first variant also meets its main table, of 50 steps
        beside = {steps} & ours | ({50} - ours if number == 0 else set())
        for ((method, seed), lines), table in product(by_run(runs).items(), PAPER["tables"]):
            key = method if method in named else theirs.get(method, method)
            alike = {*table["trained_on"]} == {*compared.weights.get(method, {})}
            if table["steps"] in beside and key in table["rows"] and alike:
                values = dict(zip(PAPER["rewards"], table["rows"][key]))
                pairs = [(lines[reward].value, values.get(reward)) for reward in evaluation.rewards]
                differing = unlike(settings, compared.entries.get(method))
                if table["steps"] != steps:
                    differing.append(f"evaluation.steps {steps} (the paper's {table['steps']})")
                about = {"method": method, "seed": seed, "pairs": pairs, "unlike": differing}
                rows.append(about | {"table": f"{table['name']}, {table['steps']} steps"})
    return rows


def unlike(settings: SimpleNamespace, entry: ResolvedRun | None) -> list[str]:
    """Return settings that are not the paper's, as `training.iterations 200 (the paper's 300)`.

    entry: None for weights that were trained elsewhere.
    """
    sections = {name: getattr(settings, name) for name in ("models", "prompts", "evaluation")}
    # How published weights were trained is not known here
    if entry:
        sections |= {"sampling": entry.sampling, "training": entry.training}
    return [
        f"{section}.{key} {_shown(value)} (the paper's {_shown(theirs)})"
        for section, of_section in sections.items()
        for key, theirs in PAPER["settings"][section].items()
        if (value := getattr(of_section, key)) != theirs
    ]


def _shown(value: object) -> str:
    if isinstance(value, int | float):
        return f"{value:g}"
    return value if isinstance(value, str) else "none" if value is None else "set"
