"""Every comparison of a report with its interval, as report.json has them."""

import math
from collections.abc import Iterator

from g2rpo_core.config.comparisons import TRAINING
from g2rpo_core.evaluation.results import LABELS as IMAGE_STATS
from g2rpo_core.foundation.runs import BASE, run_name
from g2rpo_core.reporting.page import Page
from g2rpo_core.reporting.tables import Line, Variant, lines_of, standard_errors


def headline(page: Page) -> dict:
    """Return every mean, the gain in the training reward, and every comparison.

    Where the base is drawn in several ways, also these, in `drawn`.
    """
    rewards, drawn = page.compared.settings.evaluation.rewards, page.compared.drawn
    means = {}
    for run, lines in page.runs.items():
        means[run_name(*run)] = {reward: lines[reward].value for reward in rewards}
        if gain := lines.get(TRAINING):
            errors = standard_errors(gain) if gain.known else None
            means[run_name(*run)] |= {
                "training_reward_gain": gain.difference,
                "training_reward_gain_standard_errors": errors,
            }
    bases = {run_name(name, BASE[1]): sampling.drawn for name, sampling in drawn.items()}
    return means | ({"drawn": bases} if len(bases) > 1 else {}) | {"comparisons": comparisons(page)}


def comparisons(page: Page) -> list[dict]:
    """Return one entry for every comparison with an interval that a page shows.

    `of` and `against` are runs, or methods where the interval is over seeds; `reward` is one of the
    rewards or image statistics, or `training`, the training reward; `on` tells the style, or the
    steps and checkpoint, where these are not the page's first; a comparison that was named
    beforehand has the `margin` by which it may be below.
    """
    every = (*_of_runs(page), *_of_methods(page))
    return [entry for entry in every if not math.isnan(entry["low"])]


def _of_runs(page: Page) -> Iterator[dict]:
    """Yield every run against the base and against another of the same seed."""
    columns = (TRAINING, *page.compared.settings.evaluation.rewards), IMAGE_STATS
    lines = [
        (of_run[name], "")
        for names in columns
        for of_run in page.runs.values()
        for name in names
        if name in of_run
    ]
    lines += [(line, f"style {line.style}") for line in page.part("style")]
    lines += [
        (of_run[TRAINING], _named(variant))
        for variant, runs in list(page.variants.items())[1:]
        for of_run in runs.values()
        if TRAINING in of_run
    ]
    for line, on in lines:
        base = run_name(*(page.compared.bases_of[line.method], BASE[1]))
        yield _entry(line, run_name(line.method, line.seed), base, on)
    for line in page.part("pair"):
        yield _entry(line, run_name(line.method, line.seed), run_name(line.against, line.seed))


def _of_methods(page: Page) -> Iterator[dict]:
    """Yield every method against the base and against others, over at least three seeds."""
    base = page.compared.bases_of.__getitem__
    for line in lines_of(page.gains.table):
        yield _entry(line, line.method, base(line.method))
    for group in page.gains.groups:
        for of_method in group.above.values():
            yield from (_entry(line, line.method, line.against) for line in of_method.values())
    for group in page.gains.groups:
        for variant, gains in list(zip(page.variants, group.variants))[1:]:
            yield from (
                _entry(line, name, base(name), _named(variant)) for name, line in gains.items()
            )
    for line in page.gains.preregistered:
        entry = _entry(line, line.method, line.against, "named beforehand")
        yield entry | {"margin": line.margin}


def _named(variant: Variant) -> str:
    return f"{variant[1]} steps, checkpoint {variant[0]}"


def _entry(line: Line, of: str, against: str, on: str = "") -> dict:
    """Return a line as an entry of report.json."""
    entry = {"of": of, "against": against, "reward": line.reward} | ({"on": on} if on else {})
    return entry | {"difference": line.difference, "low": line.low, "high": line.high}
