"""Puts together everything that the report shows, from the table of comparisons."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from g2rpo_core.config.comparisons import TRAINING
from g2rpo_core.config.costs import cost_of
from g2rpo_core.config.profile import ResolvedRun
from g2rpo_core.foundation.runs import is_base
from g2rpo_core.reporting.images import embed_images
from g2rpo_core.reporting.measured import Compared, Sources
from g2rpo_core.reporting.over_seeds import Gains, compare_over_seeds
from g2rpo_core.reporting.tables import (
    RATIO_ERROR,
    Line,
    Run,
    Variant,
    by_run,
    judged,
    keyed,
    lines_of,
    part_of,
)
from g2rpo_core.reporting.verdict import conclude, paper_rows

TOTAL = "total_compute"  # a column beside those of training records


@dataclass(frozen=True)
class Title:
    """What the page is about, in the words of who asked."""

    title: str
    about: str = ""
    equal: str = ""
    """What is held equal."""
    hashes_in: str = ""
    """A file with the hashes, relative to the page; empty if the page shows them."""


@dataclass(frozen=True)
class Page:
    """Everything that the templates show."""

    title: Title
    compared: Compared
    table: pd.DataFrame
    """Of comparisons, `tables.judged`."""
    variants: dict[Variant, dict[Run, dict[str, Line]]]
    """The base and every run, by reward, at each checkpoint and number of steps; reported first."""
    gains: Gains
    training: dict[str, Any]
    """As `show_training`."""
    paper: list[dict]
    """As `paper_rows`."""
    settings: dict[str, list[str]]
    """As `settings_table`."""
    provenance: list[tuple[str, str]]
    verdict: dict[str, Any]
    """As `conclude`."""
    images: dict[str, Any] | None
    """As `embed_images`."""

    def part(self, name: str) -> list[Line]:
        """Return the lines of one part of the table."""
        return lines_of(part_of(self.table, name))

    @property
    def runs(self) -> dict[Run, dict[str, Line]]:
        """Return the first of `variants`."""
        return next(iter(self.variants.values()))

    @property
    def ends(self) -> dict[str, tuple[float, float]]:
        """Return what the base and the task's own pictures score, means over bases, by reward.

        Also in the training reward, if all methods share it; {} where no task drew pictures.
        """
        means = part_of(self.table, "ceiling").groupby("reward", sort=False).value.mean()
        base = next(lines for (method, _), lines in self.runs.items() if is_base(method))
        ends = {reward: (base[reward].value, own) for reward, own in means.items()}
        shared = self.gains.groups[0].weights if len(self.gains.groups) == 1 else {}
        if shared and shared.keys() <= ends.keys():
            worth = lambda end: sum(on * ends[name][end] for name, on in shared.items())
            ends[TRAINING] = worth(0), worth(1)
        return ends

    @property
    def matrix(self) -> dict[Run, dict[str, Line]]:
        """Return each run against each other one that shares its training reward, by its name."""
        return keyed(part_of(self.table, "matrix"), ["method", "seed"], "against")


def build_page(
    compared: Compared, table: pd.DataFrame, title: Title, sources: Sources | None = None
) -> Page:
    """Return all that the templates show; sources: of images, None for a page without them."""
    table = judged(table)
    training = show_training(compared, table)
    variants = dict(iter(part_of(table, "run").groupby(["checkpoint", "steps"], sort=False)))
    gains = compare_over_seeds(compared, list(variants.values()))
    return Page(
        title=title,
        compared=compared,
        table=table,
        variants={variant: by_run(lines) for variant, lines in variants.items()},
        gains=gains,
        training=training,
        paper=paper_rows(compared, variants),
        settings=settings_table([compared.entries[name] for name in compared.names]),
        provenance=provenance_lines(compared, table.attrs["versions"]),
        verdict=conclude(compared, table, gains, training["granularities"]),
        images=embed_images(sources, compared, table, gains.best) if sources else None,
    )


def show_training(compared: Compared, table: pd.DataFrame) -> dict[str, Any]:
    """Return what training recorded.

    That is, of each run: `curves`, the records with held-out rewards, and `panels`, the columns of
    these that are drawn, with their titles; `costs`, the last record with the largest ratio error;
    `compute`, the mean total compute of each method's runs, the least first; and `granularities`,
    the mean agreement over all iterations: a line per run, granularity and reward.
    """
    curves, costs, granularities = {}, {}, []
    for run, lines in part_of(table, "training").groupby(["method", "seed"], sort=False):
        # Without the columns that the run lacks
        records = lines.dropna(axis=1, how="all").reset_index(drop=True)
        cost = cost_of(compared.entries[run[0]], run[1], records)
        records = records.assign(**{TOTAL: cost.total, "images": cost.images})
        # Bases start far apart, so that their curves are differences to the first record
        heldout = list(records.filter(like="heldout_"))
        curves[run] = records.dropna(subset=heldout)
        if compared.bases and len(curves[run]):
            curves[run] = curves[run].assign(**curves[run][heldout] - curves[run][heldout].iloc[0])
        # Methods without a ratio have no such column
        error = records[RATIO_ERROR].max() if RATIO_ERROR in records else None
        costs[run] = records.iloc[-1].to_dict() | {"ratio_error": error}
        for column in records.filter(like="correlation_"):
            reward, granularity = column.removeprefix("correlation_").rsplit("_", 1)
            gap, correlation = records[f"gap_{reward}_{granularity}"].mean(), records[column].mean()
            line = {"method": run[0], "seed": run[1], "reward": reward, "granularity": granularity}
            granularities.append(line | {"gap": gap, "correlation": correlation})
    shown = [f"heldout_{name}" for name in compared.settings.training.rewards]
    shown += [name for records in curves.values() for name in records.filter(like="heldout_")]
    gain, label = ", gain" if compared.bases else "", compared.reward_labels
    panels = {name: label[name.removeprefix("heldout_")] + gain for name in shown}
    totals = pd.Series({run: cost[TOTAL] for run, cost in costs.items()}, dtype=float)
    return {
        "curves": curves,
        "panels": panels,
        "costs": costs,
        "compute": totals.groupby(level=0).mean().sort_values().to_dict(),
        "granularities": granularities,
    }


def settings_table(runs: Sequence[ResolvedRun]) -> dict[str, list[str]]:
    """Return every resolved setting with its value in each run; '' where a run does not have it."""
    resolved = [
        {
            f"{part}.{key}": value
            for part, settings in {
                **run.method.model_dump(),
                "training": run.training.model_dump(exclude={"monitor"}),
                "sampling": run.sampling.model_dump(),
            }.items()
            for key, value in settings.items()
        }
        for run in runs
    ]
    keys = dict.fromkeys(key for settings in resolved for key in settings)
    return {key: [shown(settings.get(key, "")) for settings in resolved] for key in keys}


def shown(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key}: {part}" for key, part in value.items())
    return ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def provenance_lines(compared: Compared, versions: str) -> list[tuple[str, str]]:
    """Return versions and seeds as lines; the same inputs give the same lines."""
    settings, bases = compared.settings, ", ".join(map(str, compared.bases))
    seeds = compared.seeds or dict.fromkeys(seed for _, seed in compared.runs)
    return [
        ("versions", versions),
        ("training seeds", ", ".join(map(str, seeds))),
        *([("bases, by the seed of their models", bases)] if bases else []),
        ("other seeds", f"prompts {settings.prompts.seed}, evaluation {settings.evaluation.seed}"),
    ]
