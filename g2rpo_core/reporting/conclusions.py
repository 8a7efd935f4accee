"""Lists every comparison of a report with its interval, for programs: `make verify` reads them from report.json."""

import math
from collections.abc import Iterator, Mapping
from functools import partial

from g2rpo_core.config.comparisons import TRAINING
from g2rpo_core.foundation.runs import BASE, run_name
from g2rpo_core.reporting.statistics import Difference, Spread

BASE_NAMES = (run_name(*BASE), BASE[0])  # of a run, and of a method; where the base is drawn in several ways, up to the first dot


def comparisons(context: Mapping) -> list[dict]:
    """Return one entry for every comparison with an interval that the page of this context shows (`context.build_context`).

    `of` and `against` are runs, or methods where the interval is over seeds; `reward` is one of the rewards or image statistics, or
    `training`, the training reward; `on` tells the style, or the steps and checkpoint, where these are not the page's first; a
    comparison that was named beforehand has the `margin` by which it may be below.
    """
    every = (*_of_runs(context), *_of_pairs(context), *_over_seeds(context), *_named_beforehand(context))
    return [one for one in every if not math.isnan(one["low"])]


def _of_runs(context: Mapping) -> Iterator[dict]:
    """Yield every run against the base: in every reward and image statistic, by style, and at other steps and checkpoints."""
    base = partial(_base_of, context)
    for row in context["rows"]:
        if row.trained:
            yield _entry(run_name(row.method, row.seed), run_name(base(row.method), BASE[1]), TRAINING, row.trained)
        for reward, cell in row.cells.items():
            if cell.difference:
                yield _entry(run_name(row.method, row.seed), run_name(base(row.method), BASE[1]), reward, cell.difference)
    for row, cells, _ in context["image_stats"]:
        for name, cell in cells.items():
            yield _entry(run_name(row.method, row.seed), run_name(base(row.method), BASE[1]), name, cell.difference)
    for row in context["styles"]:
        yield _entry(
            run_name(row.method, row.seed), run_name(base(row.method), BASE[1]), TRAINING, row.trained, on=f"style {row.style}"
        )
    for checkpoint, steps, rows in context["variants"][1:]:
        for row in rows:
            if row.trained:
                yield _entry(
                    run_name(row.method, row.seed),
                    run_name(base(row.method), BASE[1]),
                    TRAINING,
                    row.trained,
                    on=_variant(checkpoint, steps),
                )


def _of_pairs(context: Mapping) -> Iterator[dict]:
    """Yield every run against another of the same seed."""
    for pair in context["pairs"]:
        first, second = run_name(pair.first, pair.seed), run_name(pair.second, pair.seed)
        yield _entry(first, second, pair.reward or TRAINING, pair.difference)


def _over_seeds(context: Mapping) -> Iterator[dict]:
    """Yield every method against the base and against others, over at least three seeds."""
    base = partial(_base_of, context)
    for method, gained in context["by_method"]:
        for reward, gain in gained.items():
            if gain.over_seeds:
                yield _entry(method, base(method), reward or TRAINING, gain.over_seeds)
    for _, standings in context["standings"]:
        for one in standings:
            for other, gained in one.above.items():
                yield _entry(one.method, other, TRAINING, gained)
    for _, by_variant in context["variant_gains"]:
        for (checkpoint, steps, _), gains in list(zip(context["variants"], by_variant))[1:]:
            for method, gained in gains.items():
                yield _entry(method, base(method), TRAINING, gained, on=_variant(checkpoint, steps))


def _base_of(context: Mapping, method: str) -> str:
    """Return the name of the base that a method is compared with."""
    return context.get("bases_of", {}).get(method, BASE[0])


def _named_beforehand(context: Mapping) -> Iterator[dict]:
    for one in context["comparisons"]:
        asked = one.comparison
        yield _entry(asked.method, asked.against, asked.reward, one.difference, on="named beforehand") | {"margin": asked.margin}


def _variant(checkpoint: str | int, steps: int) -> str:
    return f"{steps} steps, checkpoint {checkpoint}"


def _entry(of: str, against: str, reward: str, found: Difference | Spread, on: str | None = None) -> dict:
    entry = {"of": of, "against": against, "reward": reward} | ({"on": on} if on else {})
    return entry | {"difference": found.mean, "low": found.low, "high": found.high}
