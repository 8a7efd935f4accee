"""Compare the conclusions of two reports: sign and significance in their report.json.

Experimental: main works without it.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from g2rpo_core.config.comparisons import TRAINING
from g2rpo_core.evaluation.results import LABELS as IMAGE_STATS
from g2rpo_core.foundation.errors import UserError
from g2rpo_core.foundation.files import complaint, reading
from g2rpo_core.reporting.conclusions import BASE_NAMES
from g2rpo_core.rewards.registry import labels

LABELS = labels({}) | IMAGE_STATS | {TRAINING: "the training reward"}
Key = tuple[str, ...]  # who, against whom, in what, on which part


def comparisons_in(report: Any, path: Path) -> dict[Key, Mapping] | None:
    """Return the comparisons of a report.json, or None if an older version wrote it.

    UserError if they are damaged.
    """
    if not isinstance(report, dict):
        raise UserError(complaint(path, "is not a JSON object"))
    if "comparisons" not in report:
        return None
    with reading(path):
        for one in report["comparisons"]:
            interval(one)
        return {
            (one["of"], one["against"], one["reward"], one.get("on", "")): one
            for one in report["comparisons"]
        }


def changed(before: Mapping[Key, Mapping], after: Mapping[Key, Mapping]) -> list[str]:
    """Return a sentence for every comparison that changed or that only one report has."""
    sentences = []
    for key in before.keys() | after.keys():
        was, now = before.get(key), after.get(key)
        if was is None or now is None or conclusion(was) != conclusion(now):
            sentences.append(
                (_place(key, before, after), f"{_title(key)}: was {_said(was)}, now {_said(now)}")
            )
    return [sentence for _, sentence in sorted(sentences)]


def conclusion(one: Mapping) -> str:
    """Return what a comparison says.

    One that was named beforehand holds if its whole interval is above minus its margin.
    """
    _, low, high = interval(one)
    if "margin" in one:
        return "confirmed" if low > -one["margin"] else "not confirmed"
    return (
        "significantly above"
        if low > 0
        else "significantly below"
        if high < 0
        else "not significantly different"
    )


def interval(one: Mapping) -> tuple[float, float, float]:
    """Return the difference of a comparison and both ends of its interval."""
    return float(one["difference"]), float(one["low"]), float(one["high"])


def _said(one: Mapping | None) -> str:
    if one is None:
        return "not compared"
    return "{} ({:+.3g} [{:+.3g}, {:+.3g}])".format(conclusion(one), *interval(one))


def _title(key: Key) -> str:
    of, against, reward, on = key
    other = "the base" if against.partition(".")[0] in BASE_NAMES else against
    return f"{of} against {other} in {LABELS.get(reward, reward)}{f', {on}' if on else ''}"


def _place(key: Key, before: Mapping[Key, Mapping], after: Mapping[Key, Mapping]) -> int:
    """Return where a comparison stands in its report; those that are gone come last."""
    return list(after).index(key) if key in after else len(after) + list(before).index(key)
