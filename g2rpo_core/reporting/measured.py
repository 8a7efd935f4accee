"""What a report compares (`Compared`), and its numbers, from the scores of every prompt.

If the numbers are incomplete or of other runs, a UserError says how to make them again.
`recorded.py` reads the same from a study's results.parquet.
"""

import platform
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from functools import cached_property
from itertools import filterfalse, product
from pathlib import Path
from statistics import mean
from types import SimpleNamespace
from typing import Literal

import pandas as pd

from g2rpo_core.algorithm.methods import LABELS
from g2rpo_core.config.comparisons import TRAINING, Comparison
from g2rpo_core.config.drawn import base_for, bases_for
from g2rpo_core.config.profile import ResolvedRun, sampling_of
from g2rpo_core.data.prompts import left_out_of, load_prompts
from g2rpo_core.evaluation.ceiling import CEILING
from g2rpo_core.evaluation.results import LABELS as IMAGE_STATS
from g2rpo_core.evaluation.results import SCORES, chosen, reported
from g2rpo_core.foundation.errors import UserError
from g2rpo_core.foundation.files import complaint, existing, read_json
from g2rpo_core.foundation.runs import (
    BASE,
    TRAINING_RECORDS,
    evaluation_folder,
    is_base,
    label_bases,
    read_lock,
    run_name,
)
from g2rpo_core.foundation.tables import COUNT, check_values, read_numbers, read_table
from g2rpo_core.foundation.texts import comparable
from g2rpo_core.numerics.portable import in_use
from g2rpo_core.numerics.processes import version_of
from g2rpo_core.reporting import tables
from g2rpo_core.reporting.tables import Run, Weights
from g2rpo_core.rewards.registry import labels
from g2rpo_core.sampling.settings import SamplingSettings
from g2rpo_core.training.drift import history

PACKAGES = ("torch", "diffusers", "transformers", "open_clip_torch", "dvc", "pyarrow", "numpy")


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
    _: KW_ONLY
    published: tuple[str, ...] = ()
    """Names in the section `published`: in tables on evaluation, not in those on training."""
    comparisons: tuple[Comparison, ...] = ()
    """Those that a study registered before its runs."""
    unit: Literal["seed", "base"] = "seed"
    """What intervals are over. The number of a run is its seed, or its base, a mean over seeds."""
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
        return labels | {
            name: self.settings.published[name].label or name for name in self.published
        }

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
        """Return the base, drawn in the same way, that each name is compared with."""
        return {name: base_for(self.drawn, sampling) for name, sampling in self.sampling.items()}

    def base_of(self, run: Run) -> Run:
        """Return the base as it is drawn in the way of a run."""
        return (self.bases_of.get(run[0], run[0]), BASE[1])

    @cached_property
    def trained_on(self) -> dict[str, Mapping[str, float]]:
        """Return the weights of every entry's training rewards."""
        return {name: self.entries[name].training.rewards for name in self.names}

    @cached_property
    def weights(self) -> Weights:
        """Return `trained_on` with published weights: empty where it is not known."""
        return self.trained_on | {
            name: self.settings.published[name].trained_on for name in self.published
        }

    @property
    def first_weights(self) -> Mapping[str, float]:
        """Return the first run's training rewards; the profile's if they are not known."""
        first = next(iter(self.weights.values()))
        return first or self.settings.training.rewards

    @property
    def stated_weights(self) -> Weights:
        """Return the training rewards that a page states; without runs, the published ones'."""
        return self.trained_on or {name: on for name, on in self.weights.items() if on}

    @cached_property
    def groups(self) -> list[list[str]]:
        """Return the entries in groups that share a training reward."""
        groups: dict[tuple, list[str]] = {}
        for name in self.names:
            groups.setdefault(tuple(sorted(self.trained_on[name].items())), []).append(name)
        return list(groups.values())

    @cached_property
    def reward_labels(self) -> dict[str, str]:
        """Return the names of rewards and image statistics in reports."""
        return labels(self.settings.rewards) | IMAGE_STATS

    @property
    def titles(self) -> dict[str, str]:
        """Return rewards' titles, which tell whether all, some or no methods trained on them."""
        titles = {TRAINING: "training reward"}
        for name in self.settings.evaluation.rewards:
            trained = [name in rewards for rewards in self.weights.values()]
            some = "trained on by some" if any(trained) else "held out"
            whose = "trained on" if all(trained) else some
            titles[name] = f"{self.reward_labels[name]}, {whose}"
        return titles

    @property
    def outside(self) -> list[str]:
        """Return the rewards that not all entries were trained on."""
        inside = set.intersection(*map(set, self.trained_on.values())) if self.names else set()
        return [name for name in self.settings.evaluation.rewards if name not in inside]

    @property
    def held_out(self) -> list[str]:
        """Return the rewards that no run was trained on, as far as is known."""
        inside = set().union(*self.weights.values())
        return [name for name in self.settings.evaluation.rewards if name not in inside]

    @property
    def few(self) -> bool:
        """Tell whether methods are compared in every reward, not only in the training reward."""
        return len(self.names) <= 3


@dataclass(frozen=True)
class Sources:
    """Where the report's numbers are."""

    _: KW_ONLY
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
    """Read one evaluation's rows; UserError if its table is missing, damaged or another run's."""
    file = existing(folder / "results.parquet")
    table = read_table(file, SCORES)
    if not len(table) or set(zip(table.method, table.seed)) != {run}:
        raise UserError(complaint(file, f"does not hold the scores of {run_name(*run)} alone"))
    return table


def check_whole(
    results: pd.DataFrame,
    evaluated: Mapping[Run, Path],
    settings: SimpleNamespace,
    published: Sequence[str],
) -> None:
    """Check that evaluations have all rewards, checkpoints and numbers of steps; else UserError."""
    evaluation = settings.evaluation
    for (method, seed), folder in evaluated.items():
        table = results[(results.method == method) & (results.seed == seed)]
        checkpoints = (
            ("final",) if is_base(method) or method in published else evaluation.checkpoints
        )
        wanted = {
            (str(kept), steps, reward)
            for kept in checkpoints
            for steps in evaluation.steps
            for reward in evaluation.rewards
        }
        there = set(zip(table.checkpoint, table.steps, table.reward))
        if lacking := sorted(wanted - there):
            what = (
                f"has no scores of {lacking[0][2]} at {lacking[0][1]} steps of checkpoint "
                f"{lacking[0][0]}"
            )
            raise UserError(complaint(folder / "results.parquet", what))


def read_seconds(
    names: Sequence[str], seeds: Sequence[int], timings: Sequence[Path], labels: Mapping[str, str]
) -> dict[str, dict[str, float]]:
    """Read the seconds of training until each iteration's end, by a method's label.

    They are means over seeds and folders of timings. Methods with a run that was made elsewhere,
    without timings here, are left out. UserError if a file is damaged.
    """
    by_method: dict[str, list[dict[str, float]]] = {}
    for folder, name, seed in product(timings, names, seeds):
        file = folder / f"{run_name(name, seed)}.json"
        found = read_json(file, dict).get("seconds") if file.exists() else {}
        if not isinstance(found, dict) or not all(
            key.isdecimal() and type(found[key]) in (int, float) for key in found
        ):
            raise UserError(complaint(file, "holds no seconds of iterations"))
        by_method.setdefault(labels[name], []).append(found)
    shared = {label: set.intersection(*map(set, found)) for label, found in by_method.items()}
    return {
        label: {
            iteration: round(mean(each[iteration] for each in found), 3)
            for iteration in sorted(shared[label], key=int)
        }
        for label, found in by_method.items()
        if shared[label]
    }


def read_training_records(run: Run, folder: Path) -> pd.DataFrame:
    """Read the training records of a run; UserError if they are missing or damaged."""
    file = existing(folder / TRAINING_RECORDS)
    table = read_table(file)
    columns = {"iteration": COUNT, "num_forward_evals": COUNT, "num_transitions": COUNT}
    if not len(table) or not columns.keys() <= set(table.columns):
        raise UserError(complaint(file, "holds no training records"))
    check_values(file, table, columns)
    return table


def prompt_counts(folder: Path) -> str:
    """Return a sentence on the numbers of prompts, and on how many were left out of training.

    UserError if a prompt is in both sets.
    """
    files = {name: folder / f"{name}.parquet" for name in ("train", "test")}
    sets = {name: load_prompts(file) for name, file in files.items()}
    texts = {
        name: {comparable(prompt.text) for prompt in prompts} for name, prompts in sets.items()
    }
    if both := texts["train"] & texts["test"]:
        reason = f"has {len(both)} prompts that are also test prompts: nothing would be held out"
        raise UserError(complaint(files["train"], reason))
    # What the stage `prompts` left out
    left_out = {name: left_out_of(file) for name, file in files.items()}
    twice = sum(counts.get("twice", 0) for counts in left_out.values())
    tested = left_out["train"].get("test prompts", 0)
    return (
        f"{len(sets['train'])} training prompts and {len(sets['test'])} test prompts; "
        f"no text is in both ({tested} test prompts were left "
        f"out of training, and {twice} that a file had twice)"
    )


def locked(
    locks: Iterable[Path], profile: str, runs: Iterable[Run], published: Sequence[str]
) -> list[tuple[str, str]]:
    """List DVC's hashes of training's code, and of the stages that last ran with this profile."""
    stages: dict[str, dict] = {}
    for lock in filter(Path.exists, dict.fromkeys(locks)):
        stages |= {
            name: stage
            for name, stage in read_lock(lock).items()
            if f"--profile {profile} " in f"{stage.get('cmd')} "
        }
    # The outputs of every stage, in the order of the pipeline
    wanted = ["models", "prompts", "embed", "evaluate_base"]
    wanted += [f"{stage}@{run_name(*run)}" for stage in ("train", "evaluate") for run in runs]
    wanted += (
        ["published", *(f"evaluate_published@{name}" for name in published)] if published else []
    )
    missing = "not in dvc.lock for this profile"
    # A study's paths start in its own folder, a base's in one further down
    listed = lambda entries: ", ".join(
        f"{entry['path'].replace('../', '')} {entry['md5']}" for entry in entries
    )
    trainings = (stages[name] for name in wanted if name.startswith("train@") and name in stages)
    read = next(trainings, {}).get("params", {}).get("reports/profile.yaml", {})
    code = read.get("code.train")
    outputs = {name: listed(stages.get(name, {}).get("outs", [])) for name in wanted}
    return [
        ("code of training", code or missing),
        *((f"dvc.lock {name}", hashes or missing) for name, hashes in outputs.items()),
    ]


def model_lines(file: Path) -> list[tuple[str, str]]:
    """Return the name of each model with a sentence on what the stage `models` measured of it."""
    quality = read_json(existing(file), dict)
    for values in quality.values():
        if not isinstance(values, dict) or not all(
            isinstance(value, int | float) for value in values.values()
        ):
            raise UserError(complaint(file, "holds no numbers of models"))
    meaning = {
        "attribute": "right caption against one wrong attribute (chance 0.5)",
        "degraded": "clean against degraded image (chance 0.5)",
    }
    shown = lambda key, value: (
        f"{meaning.get(key, key)} {value:{',' if isinstance(value, int) else '.3f'}}"
    )
    return [
        (name, "; ".join(shown(key, value) for key, value in values.items()))
        for name, values in quality.items()
    ]


def measure(compared: Compared, sources: Sources) -> pd.DataFrame:
    """Read and compare evaluations and training records.

    UserError if some are missing, damaged or of other runs. Returns the table of comparisons
    (`tables.py`), that checkpoint and number of steps first that reports use. Its attributes are
    what a report says beside it: `prompts`, how many test prompts; `prompt_counts`, a sentence;
    `models`, as `model_lines`; `versions`; `hashes`, as `locked`.
    """
    scores, records, about = _read(compared, sources)
    lines = [
        *comparison_lines(compared, scores),
        *tables.missing_lines(scores),
        *tables.training_lines(records),
        *warning_lines(compared, records),
        *prompt_lines(compared, scores),
        *ceiling_lines(sources, BASE[1]),
    ]
    return tables.tabulate(lines, about)


def measure_bases(compared: Compared, sources: Mapping[int, Sources]) -> pd.DataFrame:
    """Read each base's evaluations and records, average them over seeds, and compare them.

    UserError as `measure`. A base's runs are compared with that base before training; their
    interval is over prompts, whose scores the table lacks.
    """
    lines: list[dict] = []
    about: dict[int, dict] = {}
    for base, own in sources.items():
        apart = replace(compared, runs=list(product(compared.names, compared.seeds)))
        scores, records, about[base] = _read(apart, own)
        # The mean over seeds, of every prompt's scores and of every record
        within = [name for name in SCORES if name not in ("seed", "score", "reason")]
        averaged = scores.groupby(within, sort=False, dropna=False).score.mean().reset_index()
        averaged["seed"] = averaged.method.map(is_base).map({True: BASE[1], False: base})
        curves = {}
        for name in compared.names:
            together = pd.concat([records[name, seed] for seed in compared.seeds])
            curves[name, base] = together.groupby("iteration", as_index=False).mean()
        alone = replace(compared, runs=[(name, base) for name in compared.names])
        lines += [
            *comparison_lines(alone, averaged),
            *(line | {"seed": base} for line in tables.missing_lines(scores)),
            *tables.training_lines(curves),
            *(line | {"seed": base} for line in warning_lines(apart, records)),
            *seed_lines(scores, base),
            *ceiling_lines(own, base),
        ]
    # Part by part, as of one base
    lines.sort(key=lambda line: tables.PARTS.index(line["part"]))
    is_run = lambda line: line["part"] == "run"
    runs = _with_mean_base(compared, pd.DataFrame(filter(is_run, lines)))
    of_all = {
        name: [(f"base {base}, {key}", text) for base in about for key, text in about[base][name]]
        for name in ("hashes", "models")
    }
    every = [*runs.to_dict("records"), *filterfalse(is_run, lines)]
    return tables.tabulate(every, next(iter(about.values())) | of_all)


def prompt_lines(compared: Compared, scores: pd.DataFrame) -> list[dict]:
    """Return each prompt's scores at the checkpoint and number of steps that reports use."""
    kept = reported(scores, compared.settings.evaluation)
    kept = kept[kept.reward.isin(compared.settings.evaluation.rewards)].assign(part="prompt")
    return kept.rename(columns={"score": "value", "reason": "note"}).to_dict("records")


def seed_lines(scores: pd.DataFrame, base: int) -> list[dict]:
    """Return the mean score of every seed on a base."""
    keys = ["method", "seed", "checkpoint", "steps", "reward"]
    means = scores.groupby(keys, sort=False).score.mean().rename("value").reset_index()
    return means.assign(part="seed", base=base).to_dict("records")


def _with_mean_base(compared: Compared, runs: pd.DataFrame) -> pd.DataFrame:
    """Replace each base before training by the mean of all, in the lines of runs over bases."""
    keys = ["checkpoint", "steps", "method", "reward"]
    starts = runs[runs.method.map(is_base)].groupby([*keys, "part", "seed"], sort=False)
    starts = starts.agg({"value": mean, "missing": "sum"}).reset_index()
    together = pd.concat([starts, runs[~runs.method.map(is_base)]], ignore_index=True)
    evaluation = compared.settings.evaluation
    return tables.arranged(
        together,
        checkpoint=map(str, evaluation.checkpoints),
        steps=evaluation.steps,
        method=[*compared.drawn, *compared.names],
    )


def _read(
    compared: Compared, sources: Sources
) -> tuple[pd.DataFrame, dict[Run, pd.DataFrame], dict]:
    """Read the scores, the training records, and the table's attributes; errors as `measure`."""
    folders = sources.folders([*compared.base_runs, *compared.runs, *compared.others])
    scores = pd.concat(
        [read_scores(run, folder) for run, folder in folders.items()], ignore_index=True
    )
    check_whole(scores, folders, compared.settings, compared.published)
    records = {
        run: read_training_records(run, sources.runs / run_name(*run)) for run in compared.runs
    }
    packages = (f"{name} {version_of(name)}" for name in PACKAGES)
    about = {
        "prompts": reported(scores, compared.settings.evaluation).prompt_id.nunique(),
        "prompt_counts": prompt_counts(sources.prompts),
        "models": model_lines(sources.quality),
        "versions": ", ".join(
            [f"Python {platform.python_version()}", *packages, f"numerics {in_use()}"]
        ),
        "hashes": locked(sources.locks, compared.profile, compared.runs, compared.published),
    }
    return scores, records, about


def comparison_lines(compared: Compared, scores: pd.DataFrame) -> Iterator[dict]:
    """Yield the lines of runs beside the base, then styles, then runs against each other.

    Runs are at every checkpoint and number of steps.
    """
    evaluation, weights = compared.settings.evaluation, compared.weights
    every = [*compared.base_runs, *compared.runs, *compared.others]
    bases = {run: compared.base_of(run) for run in every}
    trained = {run: base for run, base in bases.items() if weights.get(run[0])}
    results = reported(scores, evaluation)
    stats = [name for name in IMAGE_STATS if name in set(results.reward)]
    first = {"checkpoint": str(evaluation.checkpoints[0]), "steps": evaluation.steps[0]}
    for checkpoint, steps in product(evaluation.checkpoints, evaluation.steps):
        place = {"checkpoint": str(checkpoint), "steps": steps}
        table, of_stats = chosen(scores, checkpoint, steps), stats if place == first else []
        lines = tables.run_lines(table, bases, evaluation.rewards, of_stats, weights)
        yield from (line | place for line in lines)
    others = [*tables.style_lines(results, trained, weights)]
    # A page has room for pairs of at most 50 runs; over bases, these would say nothing
    if compared.unit == "seed" and len(compared.runs) <= 50:
        rewards = evaluation.rewards if compared.few else ()
        others += tables.pair_lines(results, compared.runs, rewards, compared.trained_on)
        for group in compared.groups:
            runs = [run for run in compared.runs if run[0] in group]
            others += tables.matrix_lines(results, runs, compared.trained_on[group[0]])
    yield from (line | first for line in others)


def ceiling_lines(sources: Sources, seed: int) -> Iterator[dict]:
    """Yield what the task's own pictures score, by reward; nothing where no task drew any."""
    file = sources.evaluations / run_name(*BASE) / CEILING
    if file.exists():
        about = {"part": "ceiling", "method": BASE[0], "seed": seed}
        for reward, value in read_numbers(file).items():
            yield about | {"reward": reward, "value": value}


def warning_lines(compared: Compared, records: Mapping[Run, pd.DataFrame]) -> Iterator[dict]:
    """Yield the warnings of drift in runs' records, with the iteration at which each began."""
    for run, table in records.items():
        entry = compared.entries[run[0]]
        updates = entry.method.num_updates(entry.sampling.steps)
        for iteration, text in history(table.to_dict("records"), entry.training, updates):
            about = {"part": "warning", "method": run[0], "seed": run[1]}
            yield about | {"iteration": iteration, "note": text}
