"""Render the report as a page and as Markdown, by the Jinja templates in `templates`."""

import json
import re
from collections.abc import Mapping

import pandas as pd
from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape
from markupsafe import Markup

from g2rpo_core.config.comparisons import TRAINING
from g2rpo_core.evaluation.results import LABELS as IMAGE_STATS
from g2rpo_core.foundation.runs import is_base
from g2rpo_core.foundation.texts import markdown, unsteered
from g2rpo_core.reporting.charts import curves, forest, library, svg
from g2rpo_core.reporting.page import TOTAL, Page
from g2rpo_core.reporting.tables import standard_errors

AXES = {
    "iteration": "iterations",
    "num_forward_evals": "forward evaluations (NFE) in rollouts",
    TOTAL: "total compute",
}
SENTENCES = (
    "notice",
    "judgement",
    "held_out",
    "unequal",
    "expected",
    "intervals",
    "pairing",
    "beforehand",
)


def render(page: Page) -> dict[str, str]:
    """Return the report's files by name: report.html, report.md, and each chart as an image."""
    training, labels = page.training, page.compared.labels
    charts = {
        "forest": forest_of(page),
        "curves": curves(training["curves"], training["panels"], AXES, labels),
    }
    images = {name: Markup(svg(chart)) for name, chart in charts.items()}
    pages = fill({"page": page, **vars(page), **charts, "svg": images})
    return pages | {f"{name}.svg": str(image) for name, image in images.items()}


def forest_of(page: Page) -> dict | None:
    """Return the page's forest plot; None if there is nothing to show."""
    compared = page.compared
    lines, gains = (_once(each, compared.weights) for each in (page.gains.lines, page.gains.table))
    whose = {name: f"{compared.reward_labels[name]}, {how}" for name, how in compared.whose.items()}
    titles = {TRAINING: "training reward"} | whose
    return forest(lines, gains, compared.labels, titles, page.ends)


def _once(lines: pd.DataFrame, weights: Mapping[str, Mapping[str, float]]) -> pd.DataFrame:
    """Leave out the training reward where it is one reward of all methods, which has a panel."""
    (first, *others) = [dict(each) for each in weights.values()] or [{}]
    single = list(first.values()) == [1] and all(other == first for other in others)
    return lines[lines.reward != TRAINING] if single else lines


def fill(shown: Mapping[str, object]) -> dict[str, str]:
    """Return the templates report.html and report.md with what they show."""
    environment = Environment(
        loader=PackageLoader("g2rpo_core.reporting", "templates"),
        autoescape=select_autoescape(["html.j2"]),
        undefined=StrictUndefined,
        keep_trailing_newline=True,
        # What steers terminals or reorders text is shown as its code, except in our own markup
        finalize=lambda value: unsteered(value) if type(value) is str else value,
    )
    environment.filters |= {"errors": standard_errors, "script": in_script, "literal": markdown}
    environment.filters["format"] = formatted
    environment.tests["base"] = is_base
    environment.globals |= {"library": library, "TRAINING": TRAINING, "IMAGE_STATS": IMAGE_STATS}
    # As plain text, so that report.html escapes what they name
    macros = environment.get_template("sentences.j2").make_module(dict(shown))
    sentences = {name: " ".join(str(getattr(macros, name)()).split()) for name in SENTENCES}
    return {
        name: environment.get_template(f"{name}.j2").render(shown, sentences=sentences)
        for name in ("report.html", "report.md")
    }


def formatted(pattern: str, *values: float) -> str:
    """Return numbers as `pattern` says; a dash if one is not known, as what has no spread."""
    return "–" if any(map(pd.isna, values)) else pattern % values


def in_script(value: object) -> Markup:
    """Return JSON that cannot end the script element, whatever text it holds."""
    return Markup(json.dumps(value, ensure_ascii=False).replace("<", "\\u003c"))


def small(image: str) -> str:
    """Halve a chart's SVG without a visible change.

    Drop texts for screen readers, empty paths and far decimals.
    """
    image = re.sub(
        r'<path class="(background" d="[^"]*"|foreground" d="" display="none")/>', "", image
    )
    image = re.sub(r' (aria-[a-z]+|role|class|pointer-events)="[^"]*"', "", image)
    rounded = lambda number: f"{float(number[0]):.1f}".removesuffix(".0")
    return re.sub(r"<[^>]*>", lambda tag: re.sub(r"-?\d+\.\d{2,}", rounded, tag[0]), image)
