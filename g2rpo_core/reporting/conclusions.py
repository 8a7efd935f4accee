"""Every comparison of a report with its interval, as report.json has them."""

import math

from g2rpo_core.config.comparisons import TRAINING
from g2rpo_core.evaluation.results import LABELS as IMAGE_STATS
from g2rpo_core.foundation.runs import BASE, run_name
from g2rpo_core.reporting.page import Page
from g2rpo_core.reporting.tables import Line, lines_of, standard_errors


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
    base = lambda line: page.compared.bases_of[line.method]
    named = lambda variant: f"{variant[1]} steps, checkpoint {variant[0]}"
    groups, others = page.gains.groups, list(page.variants)[1:]
    # Every run against its base
    runs = [
        (of_run[name], "")
        for names in ((TRAINING, *page.compared.settings.evaluation.rewards), IMAGE_STATS)
        for of_run in page.runs.values()
        for name in names
        if name in of_run
    ]
    runs += [(line, f"style {line.style}") for line in page.part("style")]
    runs += [
        (of_run[TRAINING], named(variant))
        for variant in others
        for of_run in page.variants[variant].values()
        if TRAINING in of_run
    ]
    # Every method against the base and against others, over at least three seeds
    methods = [(line, base(line), "") for line in lines_of(page.gains.table)]
    methods += [
        (line, line.against, "")
        for group in groups
        for of_method in group.above.values()
        for line in of_method.values()
    ]
    methods += [
        (line, base(line), named(variant))
        for group in groups
        for variant, gains in zip(others, group.variants[1:])
        for line in gains.values()
    ]
    methods += [(line, line.against, "named beforehand") for line in page.gains.preregistered]
    run = lambda line: run_name(line.method, line.seed)
    entries = [_entry(line, run(line), run_name(base(line), BASE[1]), on) for line, on in runs]
    entries += [
        _entry(line, run(line), run_name(line.against, line.seed)) for line in page.part("pair")
    ]
    entries += [_entry(line, line.method, against, on) for line, against, on in methods]
    return [entry for entry in entries if not math.isnan(entry["low"])]


def _entry(line: Line, of: str, against: str, on: str = "") -> dict:
    """Return a line as an entry of report.json."""
    entry = {"of": of, "against": against, "reward": line.reward} | ({"on": on} if on else {})
    numbers = {"difference": line.difference, "low": line.low, "high": line.high}
    return entry | numbers | ({"margin": line.margin} if hasattr(line, "margin") else {})
