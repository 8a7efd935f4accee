"""The sentences of a report, and the paper's numbers beside runs with the paper's settings."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
from ruamel.yaml import YAML

from g2rpo_core.config.comparisons import TRAINING
from g2rpo_core.config.profile import ResolvedRun
from g2rpo_core.foundation.runs import BASE, is_base
from g2rpo_core.reporting.measured import Compared
from g2rpo_core.reporting.over_seeds import Gains, Group
from g2rpo_core.reporting.tables import Line, Run, Variant, by_run, lines_of

PAPER = YAML(typ="safe", pure=True).load(Path(__file__).with_name("paper.yaml").read_text())
EQUAL = 1.02  # a smaller ratio of total compute is called equal
NOTICE = {
    "built": (
        "Profile {} is synthetic: small images of {} by small models that were trained on this "
        "machine, as were the stand-ins for published reward models. Nothing on this page is a "
        "result of the paper."
    ),
    "hub": "Profile {}: published weights, trained and evaluated as stated below.",
}


@dataclass(frozen=True)
class Words:
    """The sentences of the page; empty where there is nothing to say."""

    notice: str
    verdict: str
    summary: list[str]
    over: str
    """What intervals over seeds hold for."""
    compared_with: str
    no_interval: str
    unequal: str
    """How far methods are apart in compute."""
    beforehand: str
    """How comparisons that were named before the runs are judged."""
    expected: str
    """What sums of granularities can add, by how alike their tails rank a group."""


def write_words(
    compared: Compared,
    table: pd.DataFrame,
    first: pd.DataFrame,
    gains: Gains,
    costs: Mapping[Run, Mapping],
    granularities: Sequence[Mapping],
) -> Words:
    """Write a page's sentences.

    table: `tables.judged`; first: the runs' lines shown first; costs, granularities: as in
    `Training`.
    """
    trained = lines_of(first[first.reward == TRAINING])
    pairs = lines_of(table[(table.part == "pair") & (table.reward == TRAINING)])
    source = compared.settings.models.source
    known = {name for weights in compared.weights.values() for name in weights}
    held_out = [name for name in compared.settings.evaluation.rewards if name not in known]
    notice = NOTICE["hub" if source == "hub" else "built"].format(compared.profile, source)
    return Words(
        notice=notice + made_before(table, first),
        verdict=verdict(gains, pairs, compared.labels, compared.reward_labels, held_out),
        summary=summary(trained, pairs if compared.few else [], compared.labels, compared.unit),
        over=f"{what_intervals_are_over(compared)} {least_exact(gains, compared.unit)}".strip(),
        compared_with=compared_with(compared),
        no_interval=without_interval(first),
        unequal=unequal_compute(costs, compared.labels),
        beforehand=how_judged(gains.preregistered, compared.unit),
        expected=expected_of_sums(granularities, compared.labels),
    )


def verdict(
    gains: Gains,
    pairs: Sequence[Line],
    labels: Mapping[str, str],
    rewards: Mapping[str, str],
    held_out: Sequence[str],
) -> str:
    """Say who raised the training reward, who is ahead, and whether held-out rewards rose, too.

    pairs: of runs in their training reward; labels, rewards: names in reports.
    """
    trained = lines_of(gains.trained)
    if not trained:
        return "It is not known which rewards these weights were trained on."
    # Say who is ahead by single seeds, then who raised the training reward
    few = not any(group.ranked for group in gains.groups)
    sentences = [first_of_few(trained, pairs, labels)] if few and len(trained) > 1 else []
    every = " on every seed" if few and trained[0].seeds > 1 else ""
    risen, fallen, rest = (
        [line for line in trained if line.tone == tone] for tone in ("up", "down", "")
    )
    names = lambda some: ", ".join(
        f"{labels[line.method]} ({line.difference:+.3f})" for line in some
    )
    if len(trained) == 1:
        (only,) = trained
        verb = {"up": "raises", "down": "lowers", "": "does not significantly change"}[only.tone]
        sentences.append(
            f"{labels[only.method]} {verb} the reward that it was trained "
            f"on{every and f',{every}'} ({only.difference:+.3f})."
        )
    elif len(risen) == len(trained):
        several = "Both methods" if len(trained) == 2 else f"All {len(trained)} methods"
        listed = f": {names(risen)}" if len(risen) < 4 else ""
        sentences.append(
            f"{several} raise the reward that they were trained on{every and f',{every}'}{listed}."
        )
    else:
        counted = f"{len(risen) or 'None'} of {len(trained)} methods"
        which = names(risen) if len(risen) == 1 else counted
        verb = "raises" if len(risen) < 2 else "raise"
        some = lambda lines: names(lines) if len(lines) < 4 else f"{len(lines)} methods"
        lower = "lowers" if len(fallen) == 1 else "lower"
        fails = "not so" if every else "no significant change"
        parts = [
            f"{which} significantly {verb} the training reward{every}",
            *([f"{some(fallen)} significantly {lower} it"] if fallen else []),
            *([f"{fails}: {some(rest)}"] if rest else []),
        ]
        sentences.append("; ".join(parts) + ".")
    shared = len(gains.groups) == 1
    ranked = [group for group in gains.groups if len(group.ranked) > 1]
    sentences += [first_of_group(group, labels, {} if shared else rewards) for group in ranked]
    sentences.append(held_out_rewards(gains.table, labels, rewards, held_out))
    return " ".join(filter(None, sentences))


def first_of_group(group: Group, labels: Mapping[str, str], rewards: Mapping[str, str]) -> str:
    """Say which method of a group gains most over its seeds, and whom it significantly beats.

    rewards: names in reports; empty if all methods share the training reward, which then is not
    named.
    """
    first = group.ranked[0]
    on = f"Trained on {' + '.join(rewards[name] for name in group.weights)}, " if rewards else ""
    below = [other for other, line in group.above[first.method].items() if line.tone == "up"]
    whom = (
        " and ".join(labels[other] for other in below)
        if len(below) < 3
        else f"{len(below)} of the {len(group.ranked) - 1} others"
    )
    above = f"and is significantly above {whom}"
    ahead = above if below else "but is not significantly above any other"
    return f"{on}{labels[first.method]} gains most ({first.difference:+.3f}) {ahead}."


def held_out_rewards(
    gains: pd.DataFrame,
    labels: Mapping[str, str],
    rewards: Mapping[str, str],
    held_out: Sequence[str],
) -> str:
    """Say which held-out rewards fell, or else which rose significantly, with which methods."""
    others = gains[gains.reward.isin(held_out)]
    if fallen := [
        f"{rewards[line.reward]} of {labels[line.method]}"
        for line in lines_of(others[others.tone == "down"])
    ]:
        more = ", …" if len(fallen) > 4 else ""
        return f"Held-out rewards that significantly fall: {', '.join(fallen[:4])}{more}."
    tones = others.groupby("reward", sort=False).tone.agg(list)
    found: dict[str, list[str]] = {"all": [], "some": [], "none": []}
    for reward, seen in tones.items():
        how = "all" if set(seen) == {"up"} else "some" if "up" in seen else "none"
        found[how].append(rewards[reward])
    several = gains.method.nunique() > 1
    hows = {
        "all": "significantly with every method: " if several else "significantly: ",
        "some": "with some methods: ",
        "none": "with none: " if several else "not significantly: ",
    }
    listed = [how + ", ".join(found[key]) for key, how in hows.items() if found[key]]
    return f"Held-out rewards rise {'; '.join(listed)}." if listed else ""


def first_of_few(trained: Sequence[Line], pairs: Sequence[Line], labels: Mapping[str, str]) -> str:
    """Say how far the first method is before the second, if they share a training reward and seed.

    It is ahead if the difference is significant on every seed. trained: the highest gain first.
    """
    first, second = (line.method for line in trained[:2])
    signs = {(first, second): 1, (second, first): -1}
    shared = [(sign, line) for line in pairs if (sign := signs.get((line.method, line.against)))]
    if not shared:
        return ""
    by = sum(sign * line.difference for sign, line in shared) / len(shared)
    widths = [(line.high - line.low) / 2 for _, line in shared if line.known]
    least = f"{sum(widths) / len(widths):.3f}" if widths else ""
    unseen = f" A lead below {least} on a seed cannot be told from chance." if least else ""
    clear = sum(line.tone == ("up" if sign > 0 else "down") for sign, line in shared)
    seeds = f"{clear or 'none'} of {len(shared)} seeds" if len(shared) > 1 else "its one seed"
    significant = "" if clear or len(shared) > 1 else "not "
    next_one = labels[second] if len(trained) == 2 else f"the next, {labels[second]},"
    if clear == len(shared):
        return f"{labels[first]} is ahead of {next_one} by {by:.3f}, significantly on {seeds}."
    return (
        f"No lead is shown: {labels[first]} gains {by:.3f} more than {next_one.rstrip(',')}, "
        f"{significant}significantly on {seeds}.{unseen}"
    )


def unequal_compute(costs: Mapping[Run, Mapping], labels: Mapping[str, str]) -> str:
    """Say how far the total compute of methods is apart; '' if all had the same within 2 %.

    costs: of each run, with `total_compute`.
    """
    totals = pd.Series({run: cost["total_compute"] for run, cost in costs.items()}, dtype=float)
    if totals.empty:
        return ""
    means = totals.groupby(level=0).mean().sort_values()
    least, most = means.index[0], means.index[-1]
    ratio = means.iloc[-1] / means.iloc[0]
    if ratio < EQUAL:
        return ""
    return (
        f"Compute is not equal: {labels[most]} had {ratio:.2f} times the total compute of "
        f"{labels[least]}."
    )


def summary(
    trained: Sequence[Line], pairs: Sequence[Line], labels: Mapping[str, str], unit: str = "seed"
) -> list[str]:
    """Return sentences on each method against the base, then on methods against each other.

    trained: every run beside the base; pairs: of runs in their training reward; unit: what runs are
    numbered by.
    """
    against: dict[tuple[str, str], list[Line]] = {}
    others = [
        *(("the base", line) for line in trained),
        *((labels[line.against], line) for line in pairs),
    ]
    for other, line in others:
        against.setdefault((labels[line.method], other), []).append(line)
    sentences = []
    for (first, second), lines in against.items():
        tones = [line.tone for line in lines]
        words = {
            "up": f"significantly above {second}",
            "down": f"significantly below {second}",
            "": f"not significantly different from {second}",
        }
        counted = ", ".join(
            f"{words[each]} with {tones.count(each)} of {len(tones)} {unit}s"
            for each in words
            if each in tones
        )
        interval = lambda line: f"[{line.low:+.3f}, {line.high:+.3f}]" if line.known else "[–]"
        values = ", ".join(f"{line.difference:+.3f} {interval(line)}" for line in lines)
        sentences.append(f"{first} is {counted}: {values}.")
    return sentences


def what_intervals_are_over(compared: Compared) -> str:
    """Say what an interval over seeds or bases holds for; '' for published models alone."""
    if compared.unit == "base":
        runs = "one run" if len(compared.seeds) == 1 else f"the mean of {len(compared.seeds)} runs"
        return (
            f"Each value is {runs} on one build of the models, and the interval is over builds: "
            "Student's t on their means, so that a method may gain more on one base "
            "than on another."
        )
    if compared.settings.models.source == "hub":
        return ""
    return (
        "All runs share one build of the models: the intervals hold for this build alone, "
        "and another may end in another order."
    )


def least_exact(gains: Gains, unit: str) -> str:
    """Say below which p an exact test by sign flips cannot come; '' without methods over seeds."""
    values = max((line.seeds for group in gains.groups for line in group.ranked), default=0)
    if not values:
        return ""
    return (
        f"An exact test of {values} {unit}s, by sign flips, cannot have a p below "
        f"{2 / 2**values:.2g}."
    )


def how_judged(preregistered: Sequence[Line], unit: str) -> str:
    """Say how comparisons that were named before the runs are judged; '' if there are none."""
    if not preregistered:
        return ""
    staged = any(line.role == "primary" for line in preregistered)
    tests = {line.test for line in preregistered}
    exact = tests == {"exact"}
    by = "the exact test, by sign flips" if exact else f"Student's t over {unit}s"
    if len(tests) > 1:
        by += ", or by the exact test where a comparison names it"
    if not staged:
        return (
            f"Named before the runs, and judged together: the intervals ({by}, Bonferroni) hold "
            f"for all {len(preregistered)} at once with 95 %. One holds if its whole interval is "
            "above 0, above minus its margin, or within ± its level."
        )
    others = [line for line in preregistered if line.role == "other"]
    where = "mean" if exact else "whole interval"
    said = (
        f"Named before the runs, and judged by {by}: the primary one at 5 %, the secondary one "
        "likewise if the primary holds, all others by Holm's adjusted p-values. One holds if its "
        f"p-value is below 5 % and its {where} above 0, above minus its margin, or within ± its "
        "level."
    )
    if any(line.level for line in preregistered):
        said += " The interval of a level is the 90 % one, that of two one-sided tests."
    said += " Of each test: its p-value, and Holm's."
    if len(others) > 1:
        least = min(line.smallest for line in others)
        said += (
            f" The exact test cannot come below {least:.2g} here, and Holm makes that "
            f"{min(1, least * len(others)):.2g} for the first of {len(others)}."
        )
    return said


def expected_of_sums(granularities: Sequence[Mapping], labels: Mapping[str, str]) -> str:
    """Say what each method's sum of granularities is worth beside its finest tail alone.

    granularities: as in `Training`. '' without sums.
    """
    if not granularities:
        return ""
    table = pd.DataFrame(granularities).assign(method=lambda lines: [run[0] for run in lines.run])
    sentences = []
    for method, lines in table.groupby("method", sort=False):
        alike = lines.groupby("granularity", sort=False).correlation.mean()
        if not (alike > 0).all():  # also where no group had a spread
            continue
        low, high = worth_of_sum(alike.tolist())
        listed = ", ".join(f"{value:.2f} at λ = {tail}" for tail, value in alike.items())
        sentences.append(
            f"Expected of the sum of granularities of {labels[method]}: {low:.2f} to {high:.2f} "
            "times the samples of one tail, by how alike its tails rank a group (correlation with "
            f"the finest: {listed})."
        )
    return " ".join(sentences)


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


def compared_with(compared: Compared) -> str:
    """Say which base each method is compared with; '' where the base is drawn in one way."""
    if len(compared.drawn) == 1:
        return ""
    named = {
        base: [compared.labels[name] for name, of in compared.bases_of.items() if of == base]
        for base in compared.drawn
    }
    listed = "; ".join(
        f"{compared.labels[base]}: {', '.join(names)}" for base, names in named.items()
    )
    return (
        "Every run is drawn as it was trained, and compared with the base drawn alike. "
        f"{listed[0].upper()}{listed[1:]}."
    )


def without_interval(first: pd.DataFrame) -> str:
    """Say why differences have no interval; '' if all have one; first: the lines of runs."""
    if first.known[~first.method.map(is_base)].all():
        return ""
    return (
        "An interval over prompts needs at least two test prompts with scores: "
        "[–] stands where there are fewer."
    )


def made_before(table: pd.DataFrame, first: pd.DataFrame) -> str:
    """Say that results are older than the recording of numerics; '' for all others."""
    if "numerics" in table.attrs["versions"]:
        return ""
    base = first.value[(first.method == BASE[0]) & (first.reward == "verifier")]
    verifier = "".join(f", with a base whose exact verifier is {value:.3f}" for value in base)
    return (
        " These results were made with native numerics on one processor, "
        f"which was not recorded{verifier}: a rerun has another base."
    )


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
        tables = [table for table in PAPER["tables"] if table["steps"] in beside]
        for ((method, seed), lines), table in product(by_run(runs).items(), tables):
            key = method if method in named else theirs.get(method, method)
            trained_on = set(compared.weights.get(method, {}))
            if key in table["rows"] and set(table["trained_on"]) == trained_on:
                values = dict(zip(PAPER["rewards"], table["rows"][key]))
                pairs = [(lines[reward].value, values.get(reward)) for reward in evaluation.rewards]
                differing = unlike(settings, compared.entries.get(method))
                if table["steps"] != steps:
                    differing.append(f"evaluation.steps {steps} (the paper's {table['steps']})")
                title = f"{table['name']}, {table['steps']} steps"
                about = {"method": method, "seed": seed, "table": title}
                rows.append(about | {"pairs": pairs, "unlike": differing})
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
