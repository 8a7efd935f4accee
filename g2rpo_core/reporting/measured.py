"""Says what a report compares, and finds, reads and compares what was measured of it, from the scores of every prompt.

If the numbers are incomplete or of other runs, a UserError says how to make them again. `recorded.py` reads the same from a study's
results.parquet.
"""

import platform
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from pathlib import Path
from statistics import mean
from types import SimpleNamespace
from typing import Literal

import pandas as pd

from g2rpo_core.algorithm.methods import LABELS
from g2rpo_core.config.comparisons import Comparison
from g2rpo_core.config.drawn import base_for, bases_for
from g2rpo_core.config.profile import ResolvedRun, sampling_of
from g2rpo_core.data.prompts import left_out_of, load_prompts
from g2rpo_core.evaluation.results import LABELS as IMAGE_STATS
from g2rpo_core.evaluation.results import SCORES, chosen, reported
from g2rpo_core.foundation.errors import UserError
from g2rpo_core.foundation.files import complaint, existing, read_json, read_table
from g2rpo_core.foundation.runs import BASE, TRAINING_RECORDS, evaluation_folder, is_base, label_bases, read_lock, run_name
from g2rpo_core.foundation.texts import comparable
from g2rpo_core.numerics.probe import describe_numerics
from g2rpo_core.numerics.processes import version_of
from g2rpo_core.reporting import tables
from g2rpo_core.reporting.statistics import Difference
from g2rpo_core.reporting.tables import Cell, Pair, Row, Run, StyleRow, Weights, main_table
from g2rpo_core.rewards.registry import measured_by
from g2rpo_core.sampling.settings import SamplingSettings
from g2rpo_core.training.drift import history

PACKAGES = ("torch", "diffusers", "transformers", "open_clip_torch", "dvc", "pyarrow", "numpy")

Variant = tuple[str | int, int, list[Row]]  # checkpoint, number of steps, the base and every run


@dataclass(frozen=True)
class Compared:
    """The runs of a report, and what was asked of them."""

    profile: str
    """Its name."""
    settings: SimpleNamespace
    """Its sections."""
    entries: Mapping[str, ResolvedRun]
    """Those of its `methods`, by name."""
    runs: list[Run]
    """In the report's order."""
    published: tuple[str, ...] = ()
    """Names in the section `published`, which appear in tables on evaluation but not in tables on training."""
    comparisons: tuple[Comparison, ...] = ()
    """Those that a study registered before its runs."""
    unit: Literal["seed", "base"] = "seed"
    """What is inferred over: the number of a run is its seed, or its base, whose seeds it is the mean of."""
    seeds: tuple[int, ...] = ()
    """Of training, on each base."""

    @property
    def bases(self) -> list[int]:
        """Return the bases, if runs are inferred over these."""
        return list(dict.fromkeys(number for _, number in self.runs)) if self.unit == "base" else []

    @property
    def others(self) -> list[Run]:
        """Return published weights as runs."""
        return [(name, 0) for name in self.published]

    @cached_property
    def names(self) -> list[str]:
        """Return the entries that have runs, in the report's order."""
        return list(dict.fromkeys(method for method, _ in self.runs))

    @cached_property
    def labels(self) -> dict[str, str]:
        """Return the label of the base, of every entry and of published weights."""
        labels = dict(zip(self.drawn, label_bases([each.drawn for each in self.drawn.values()])))
        labels |= {name: self.entries[name].label or LABELS.get(name, name) for name in self.names}
        return labels | {name: self.settings.published[name].label or name for name in self.published}

    @cached_property
    def sampling(self) -> dict[str, SamplingSettings]:
        """Return how the images of every entry, and of published weights, are drawn."""
        given = (self.settings.sampling, self.entries, self.settings.published)
        return {name: sampling_of(name, *given) for name in (*self.names, *self.published)}

    @cached_property
    def drawn(self) -> dict[str, SamplingSettings]:
        """Return how the base is drawn, by name: as every run is."""
        return bases_for(self.settings.sampling, self.sampling.values())

    @property
    def base_runs(self) -> list[Run]:
        """Return the base, once for each way in which runs are drawn."""
        return [(name, BASE[1]) for name in self.drawn]

    @cached_property
    def bases_of(self) -> dict[str, str]:
        """Return the base that an entry is compared with, where this is not the first of `drawn`."""
        found = {name: base_for(self.drawn, sampling) for name, sampling in self.sampling.items()}
        return {name: base for name, base in found.items() if base != BASE[0]}

    def base_of(self, run: Run) -> Run:
        """Return the base as it is drawn in the way of a run."""
        return tables.base_of(run[0], BASE, self.bases_of)

    @cached_property
    def trained_on(self) -> dict[str, Mapping[str, float]]:
        """Return the training rewards of every entry, with their weights; one that compares images by the reward that judges it."""
        return {name: measured_by(self.entries[name].training.rewards, self.settings.rewards) for name in self.names}

    @cached_property
    def weights(self) -> Weights:
        """Return `trained_on` with published weights: empty where their training rewards are unknown."""
        return self.trained_on | {name: self.settings.published[name].trained_on for name in self.published}

    @cached_property
    def groups(self) -> list[list[str]]:
        """Return the entries in groups that share a training reward."""
        groups: dict[tuple, list[str]] = {}
        for name in self.names:
            groups.setdefault(tuple(sorted(self.trained_on[name].items())), []).append(name)
        return list(groups.values())

    @property
    def few(self) -> bool:
        """Tell whether methods are compared in every reward; with more of them, only in the training reward."""
        return len(self.names) <= 3

    @property
    def crowded(self) -> bool:
        """Tell whether methods are compared over seeds or bases alone: a table of all pairs of runs would say nothing."""
        return len(self.runs) > 50 or self.unit == "base"


@dataclass(frozen=True)
class Sources:
    """Where the report's numbers are."""

    runs: Path
    """A folder, as are evaluations and prompts."""
    evaluations: Path
    prompts: Path
    quality: Path
    """What the stage `models` measured of each model."""
    page: Path
    """The report's folder, to which links are relative."""
    locks: tuple[Path, ...]
    """DVC's."""

    def folders(self, runs: Iterable[Run]) -> dict[Run, Path]:
        """Return the folders of evaluations."""
        return {run: self.evaluations / evaluation_folder(*run) for run in runs}


def read_scores(run: Run, folder: Path) -> pd.DataFrame:
    """Read the rows of one evaluation; UserError if its table is missing, damaged or of another run."""
    file = existing(folder / "results.parquet")
    table = read_table(file, SCORES)
    if not len(table) or set(zip(table.method, table.seed)) != {run}:
        raise UserError(complaint(file, f"does not hold the scores of {run_name(*run)} alone"))
    return table


def check_whole(
    results: pd.DataFrame, evaluated: Mapping[Run, Path], settings: SimpleNamespace, published: Sequence[str]
) -> None:
    """Check that evaluations have all rewards, checkpoints and numbers of steps that the report needs; UserError otherwise."""
    evaluation = settings.evaluation
    for (method, seed), folder in evaluated.items():
        table = results[(results.method == method) & (results.seed == seed)]
        checkpoints = ("final",) if is_base(method) or method in published else evaluation.checkpoints
        wanted = {
            (str(kept), steps, reward) for kept in checkpoints for steps in evaluation.steps for reward in evaluation.rewards
        }
        there = set(zip(table.checkpoint, table.steps, table.reward))
        if lacking := sorted(wanted - there):
            what = f"has no scores of {lacking[0][2]} at {lacking[0][1]} steps of checkpoint {lacking[0][0]}"
            raise UserError(complaint(folder / "results.parquet", what))


def read_seconds(
    names: Sequence[str], seeds: Sequence[int], timings: Sequence[Path], labels: Mapping[str, str]
) -> dict[str, dict[str, float]]:
    """Read, by a method's label, the seconds of training until the end of each iteration, as means over seeds and folders of timings.

    Leave out methods with a run that was made elsewhere, so that its timings are not here. UserError if a file is damaged.
    """
    by_method: dict[str, list[dict[str, float]]] = {}
    for folder, name, seed in product(timings, names, seeds):
        file = folder / f"{run_name(name, seed)}.json"
        found = read_json(file, dict).get("seconds") if file.exists() else {}
        if not isinstance(found, dict) or not all(key.isdecimal() and type(found[key]) in (int, float) for key in found):
            raise UserError(complaint(file, "holds no seconds of iterations"))
        by_method.setdefault(labels[name], []).append(found)
    shared = {label: set.intersection(*map(set, found)) for label, found in by_method.items()}
    return {
        label: {iteration: round(mean(each[iteration] for each in found), 3) for iteration in sorted(shared[label], key=int)}
        for label, found in by_method.items()
        if shared[label]
    }


def read_training_records(run: Run, folder: Path) -> pd.DataFrame:
    """Read the training records of a run; UserError if they are missing or damaged."""
    file = existing(folder / TRAINING_RECORDS)
    table = read_table(file)
    columns = {"iteration", "num_forward_evals", "num_transitions"}
    if not len(table) or not columns <= set(table.columns):
        raise UserError(complaint(file, "holds no training records"))
    return table


def prompt_counts(folder: Path) -> str:
    """Return a sentence on how many prompts there are, and on those left out so that no test prompt is trained on.

    UserError if a prompt is in both sets.
    """
    files = {name: folder / f"{name}.parquet" for name in ("train", "test")}
    sets = {name: load_prompts(file) for name, file in files.items()}
    texts = {name: {comparable(prompt.text) for prompt in prompts} for name, prompts in sets.items()}
    if both := texts["train"] & texts["test"]:
        reason = f"has {len(both)} prompts that are also test prompts: nothing would be held out"
        raise UserError(complaint(files["train"], reason))
    # What the stage `prompts` left out
    left_out = {name: left_out_of(file) for name, file in files.items()}
    twice = sum(counts.get("twice", 0) for counts in left_out.values())
    tested = left_out["train"].get("test prompts", 0)
    return (
        f"{len(sets['train'])} training prompts and {len(sets['test'])} test prompts; no text is in both ({tested} test prompts were left "
        f"out of training, and {twice} that a file had twice)"
    )


def locked(locks: Iterable[Path], profile: str, runs: Iterable[Run], published: Sequence[str]) -> list[tuple[str, str]]:
    """List DVC's hashes of the code of training, and of the outputs of every stage that last ran with this profile."""
    stages: dict[str, dict] = {}
    for lock in filter(Path.exists, dict.fromkeys(locks)):
        stages |= {name: stage for name, stage in read_lock(lock).items() if f"--profile {profile} " in f"{stage.get('cmd')} "}
    # The outputs of every stage, in the order of the pipeline
    wanted = ["models", "prompts", "embed", "evaluate_base"]
    wanted += [f"{stage}@{run_name(*run)}" for stage in ("train", "evaluate") for run in runs]
    wanted += ["published", *(f"evaluate_published@{name}" for name in published)] if published else []
    missing = "not in dvc.lock for this profile"
    # A study's paths start in its own folder, a base's in one further down
    listed = lambda entries: ", ".join(f"{entry['path'].replace('../', '')} {entry['md5']}" for entry in entries)
    code: list[dict] = next((stages[name].get("deps", []) for name in wanted if name.startswith("train@") and name in stages), [])
    lines = [("code of training", listed(entry for entry in code if "g2rpo_core/" in entry["path"]) or missing)]
    return lines + [(f"dvc.lock {name}", listed(stages.get(name, {}).get("outs", [])) or missing) for name in wanted]


def model_lines(file: Path) -> list[tuple[str, str]]:
    """Return the name of each model with a sentence on what the stage `models` measured of it."""
    quality = read_json(existing(file), dict)
    for values in quality.values():
        if not isinstance(values, dict) or not all(isinstance(value, int | float) for value in values.values()):
            raise UserError(complaint(file, "holds no numbers of models"))
    meaning = {
        "attribute": "right caption against one wrong attribute (chance 0.5)",
        "degraded": "clean against degraded image (chance 0.5)",
    }
    shown = lambda key, value: f"{meaning.get(key, key)} {value:{',' if isinstance(value, int) else '.3f'}}"
    return [(name, "; ".join(shown(key, value) for key, value in values.items())) for name, values in quality.items()]


@dataclass(frozen=True)
class Measured:
    """The numbers of a report."""

    variants: list[Variant]
    """Every checkpoint with every number of steps, those that reports use first."""
    stats: dict[Run, dict[str, Cell]]
    """Image statistics."""
    styles: list[StyleRow]
    pairs: list[Pair]
    matrices: list[tuple[list[Run], list[list[Difference | None]]]]
    """For every group of methods with one training reward: its runs, and their differences as in `win_rates`."""
    missing: list[dict]
    """As in `missing_table`."""
    records: dict[Run, pd.DataFrame]
    """Of training."""
    warnings: list[tuple[Run, int, str]]
    """Of drift: run, iteration, text."""
    about: dict
    """Sentences and lines on prompts, models, versions and hashes."""
    scores: pd.DataFrame
    """`SCORES` by prompt; empty where only means are at hand, and over bases, whose intervals are not over prompts."""
    by_seed: Sequence[dict] = ()
    """Of runs over bases: the mean scores of each base and seed."""

    @property
    def rows(self) -> list[Row]:
        """Return the base and every run at the checkpoint and number of steps that reports use."""
        return self.variants[0][2]


def measure(compared: Compared, sources: Sources) -> Measured:
    """Read and compare evaluations and training records; UserError if some are missing, damaged or of other runs."""
    everything, records, hashes = _read(compared, sources)
    warnings = [(run, *warning) for run, table in records.items() for warning in drift_warnings(compared, run, table)]
    return _compare(compared, sources, everything, records, hashes, warnings)


def measure_bases(compared: Compared, sources: Mapping[int, Sources]) -> Measured:
    """Read each base's evaluations and records, average them over its seeds, and compare them; UserError as `measure`.

    A base's runs are compared with that base before training, and with each other; their interval is over prompts.
    """
    parts: list[Measured] = []
    by_seed: list[dict] = []
    for base, own in sources.items():
        apart = replace(compared, runs=[(name, seed) for name in compared.names for seed in compared.seeds])
        everything, records, hashes = _read(apart, own)
        keys = ["method", "seed", "checkpoint", "steps", "reward"]
        means = everything.groupby(keys, sort=False).score.mean().rename("value").reset_index()
        by_seed += means.assign(part="seed", base=base).to_dict("records")
        # The mean over seeds, of every prompt's scores and of every record
        within = [name for name in SCORES if name not in ("seed", "score", "reason")]
        averaged = everything.groupby(within, sort=False, dropna=False).score.mean().reset_index().assign(reason=None)
        averaged["seed"] = averaged.method.map(lambda method, base=base: BASE[1] if is_base(method) else base)
        of_name = {name: pd.concat([records[name, seed] for seed in compared.seeds]) for name in compared.names}
        curves = {(name, base): table.groupby("iteration", as_index=False).mean() for name, table in of_name.items()}
        warned = [((run[0], base), *warning) for run in apart.runs for warning in drift_warnings(compared, run, records[run])]
        alone = replace(compared, runs=[(name, base) for name in compared.names])
        part = _compare(alone, own, averaged[list(SCORES)], curves, hashes, warned)
        parts.append(replace(part, missing=[line | {"seed": base} for line in tables.missing_table(everything)]))
    return _joined(compared, dict(zip(sources, parts)), by_seed)


def _joined(compared: Compared, parts: Mapping[int, Measured], by_seed: list[dict]) -> Measured:
    """Put the bases' numbers one after the other; the base before training is the mean of all."""
    first, every = next(iter(parts.values())), list(parts.values())
    variants = []
    for number, (checkpoint, steps, _) in enumerate(first.variants):
        every_row = [row for part in every for row in part.variants[number][2]]
        rows = []
        for name in compared.drawn:
            starts = [row.cells for row in every_row if row.method == name]
            cells = {
                reward: Cell(mean(each[reward].mean for each in starts), sum(each[reward].missing for each in starts), None)
                for reward in starts[0]
            }
            rows.append(Row(name, BASE[1], cells, None))
        trained = [row for row in every_row if not is_base(row.method)]
        variants.append((checkpoint, steps, [*rows, *sorted(trained, key=lambda row: compared.names.index(row.method))]))
    hashes = [(f"base {base}, {name}", text) for base, part in parts.items() for name, text in part.about["hashes"]]
    models = [(f"base {base}, {name}", text) for base, part in parts.items() for name, text in part.about["models"]]
    return Measured(
        variants,
        {run: cells for part in every for run, cells in part.stats.items()},
        [row for part in every for row in part.styles],
        [pair for part in every for pair in part.pairs],
        [],
        [line for part in every for line in part.missing],
        {run: table for part in every for run, table in part.records.items()},
        [warning for part in every for warning in part.warnings],
        first.about | {"hashes": hashes, "models": models},
        first.scores[:0],
        by_seed,
    )


def _read(compared: Compared, sources: Sources) -> tuple[pd.DataFrame, dict[Run, pd.DataFrame], list[tuple[str, str]]]:
    """Return the scores of every run and of the base, the runs' training records, and DVC's hashes; UserError as `measure`."""
    folders = sources.folders([*compared.base_runs, *compared.runs, *compared.others])
    everything = pd.concat([read_scores(run, folder) for run, folder in folders.items()], ignore_index=True)
    check_whole(everything, folders, compared.settings, compared.published)
    records = {run: read_training_records(run, sources.runs / run_name(*run)) for run in compared.runs}
    return everything, records, locked(sources.locks, compared.profile, compared.runs, compared.published)


def _compare(
    compared: Compared,
    sources: Sources,
    everything: pd.DataFrame,
    records: dict[Run, pd.DataFrame],
    hashes: list[tuple[str, str]],
    warnings: list[tuple[Run, int, str]],
) -> Measured:
    """Compare every run with the base, and runs with each other."""
    settings, runs, others = compared.settings, compared.runs, compared.others
    evaluation = settings.evaluation
    results = reported(everything, evaluation)
    every, rewards, weights = [*runs, *others], evaluation.rewards, compared.weights
    variants = [
        (checkpoint, steps, main_table(chosen(everything, checkpoint, steps), BASE, every, rewards, weights, compared.bases_of))
        for checkpoint in evaluation.checkpoints
        for steps in evaluation.steps
    ]
    # Choose what a page has room for
    names = [name for name in IMAGE_STATS if name in set(results.reward)]
    trained = [(row.method, row.seed) for row in variants[0][2] if row.trained]
    groups = [] if compared.crowded else [[run for run in runs if run[0] in group] for group in compared.groups]
    return Measured(
        variants,
        {run: tables.cells(results, compared.base_of(run), run, names) for run in trained},
        tables.style_table(results, BASE, [run for run in every if weights[run[0]]], weights, compared.bases_of),
        []
        if compared.crowded
        else tables.method_pairs(results, runs, list(rewards) if compared.few else [], compared.trained_on),
        [(group, tables.win_rates(results, group, compared.trained_on[group[0][0]])) for group in groups],
        tables.missing_table(everything),
        records,
        warnings,
        {
            "prompts": results.prompt_id.nunique(),
            "prompt_counts": prompt_counts(sources.prompts),
            "models": model_lines(sources.quality),
            "versions": ", ".join(
                [f"Python {platform.python_version()}", *(f"{name} {version_of(name)}" for name in PACKAGES), describe_numerics()]
            ),
            "hashes": hashes,
        },
        results,
    )


def drift_warnings(compared: Compared, run: Run, records: pd.DataFrame) -> list[tuple[int, str]]:
    """Return the warnings of drift in a run's records, with the iteration at which each began."""
    entry = compared.entries[run[0]]
    return history(records.to_dict("records"), entry.training, entry.method.num_updates(entry.sampling.steps))
