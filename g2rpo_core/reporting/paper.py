"""The paper's numbers, beside runs that were trained and evaluated with its settings."""

from collections.abc import Mapping
from itertools import product
from pathlib import Path
from types import SimpleNamespace

from ruamel.yaml import YAML

from g2rpo_core.common.runs import BASE
from g2rpo_core.reporting.tables import Row, Weights

PAPER = YAML(typ="safe", pure=True).load(Path(__file__).with_name("paper.yaml").read_text())


def paper_rows(
    variants: list[tuple[str | int, int, list[Row]]], settings: SimpleNamespace, entries: Mapping, trained_on: Weights
) -> list[dict]:
    """The paper's numbers for the methods of our runs with the same training rewards; None where the paper has no number.

    Columns are those of `evaluation.rewards`. `unlike` lists the settings in which our run differs from the paper's; only if it
    is empty may the two be compared.
    """
    ours = set(settings.evaluation.steps) if len(settings.evaluation.steps) > 1 else set()
    named = {name for table in PAPER["tables"] for name in table["rows"]}
    lines = []
    for number, (_, steps, rows) in enumerate(variants):
        beside = {steps} & ours | ({50} - ours if number == 0 else set())
        tables = [one for one in PAPER["tables"] if one["steps"] in beside]
        for row, table in product(rows, tables):
            key = row.method if row.method in named or row.method not in entries else entries[row.method].method
            if key in table["rows"] and set(table["trained_on"]) == set(trained_on.get(row.method, {})):
                values = dict(zip(PAPER["rewards"], table["rows"][key]))
                pairs = [(row.cells[reward].mean, values.get(reward)) for reward in settings.evaluation.rewards]
                differing = unlike(settings, entries.get(row.method) if row.method != BASE[0] else None)
                if table["steps"] != steps:
                    differing.append(f"evaluation.steps {steps} (the paper's {table['steps']})")
                lines.append(
                    {"table": f"{table['name']}, {table['steps']} steps", "row": row, "pairs": pairs, "unlike": differing}
                )
    return lines


def unlike(settings: SimpleNamespace, entry: SimpleNamespace | None) -> list[str]:
    """The settings of a run, or of the base (None), that are not the paper's: `training.iterations 200 (the paper's 300)`."""
    sections = {"models": settings.models, "prompts": settings.prompts, "evaluation": settings.evaluation}
    if entry and entry.training:  # how published weights were trained is not known here
        sections |= {"sampling": entry.sampling, "training": entry.training}
    return [
        f"{section}.{key} {_shown(value)} (the paper's {_shown(theirs)})"
        for section, of_section in sections.items()
        for key, theirs in PAPER["settings"][section].items()
        if (value := getattr(of_section, key)) != theirs
    ]


def _shown(value: object) -> str:
    return (
        "none"
        if value is None
        else value
        if isinstance(value, str)
        else f"{value:g}"
        if isinstance(value, int | float)
        else "set"
    )
