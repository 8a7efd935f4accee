"""What a report compares (`Compared`), and its numbers, from the scores of every prompt.

If the numbers are incomplete or of other runs, a UserError says how to make them again.
`recorded.py` reads the same from a study's results.parquet.
"""

import platform
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from functools import cached_property
from itertools import product
from pathlib import Path
from statistics import mean
from types import SimpleNamespace

import pandas as pd

from g2rpo_core.algorithm.methods import LABELS
from g2rpo_core.config.comparisons import Comparison
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
from g2rpo_core.foundation.tables import COUNT, read_numbers, read_table
from g2rpo_core.foundation.texts import comparable
from g2rpo_core.numerics.portable import in_use
from g2rpo_core.numerics.processes import version_of
from g2rpo_core.reporting import tables
from g2rpo_core.reporting.tables import Run, Weights
from g2rpo_core.rewards.registry import labels
from g2rpo_core.sampling.settings import SamplingSettings
from g2rpo_core.training.drift import history
from g2rpo_core.training.learning import learning_lines

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
    bases: tuple[int, ...] = ()
    """If runs are inferred over these, the number of a run is its base: a mean over seeds."""
    seeds: tuple[int, ...] = ()
    """Of training, on each base."""

    @property
    def unit(self) -> str:
        """Return what intervals are over: the number of a run."""
        return "base" if self.bases else "seed"

    @cached_property
    def names(self) -> list[str]:
        """Return the entries that have runs, in the report's order."""
        return list(dict.fromkeys(method for method, _ in self.runs))

    @cached_property
    def labels(self) -> dict[str, str]:
        """Return the label of the base, of every entry and of published weights."""
        bases = label_bases([sampling.drawn for sampling in self.drawn.values()])
        entries = {name: self.entries[name].label or LABELS.get(name, name) for name in self.names}
        published = {name: self.settings.published[name].label or name for name in self.published}
        return dict(zip(self.drawn, bases)) | entries | published

    @cached_property
    def sampling(self) -> dict[str, SamplingSettings]:
        """Return how the images of every entry, and of published weights, are drawn."""
        given = (self.settings.sampling, self.entries, self.settings.published)
        return {name: sampling_of(name, *given) for name in (*self.names, *self.published)}

    @cached_property
    def drawn(self) -> dict[str, SamplingSettings]:
        """Return how the base is drawn, by name: as every run is."""
        return bases_for(self.settings.sampling, self.sampling.values())

    @cached_property
    def bases_of(self) -> dict[str, str]:
        """Return the base, drawn in the same way, that each name is compared with."""
        return {
            name: base_for(self.drawn, how) for name, how in (self.drawn | self.sampling).items()
        }

    @property
    def evaluated(self) -> list[Run]:
        """Return the base, as often as it is drawn, then the runs, then published weights."""
        untrained = lambda names: [(name, BASE[1]) for name in names]
        return [*untrained(self.drawn), *self.runs, *untrained(self.published)]

    @cached_property
    def weights(self) -> Weights:
        """Return the weights of training rewards; of published weights, empty if not known."""
        published = {name: self.settings.published[name].trained_on for name in self.published}
        return {name: self.entries[name].training.rewards for name in self.names} | published

    @cached_property
    def groups(self) -> list[list[str]]:
        """Return the entries in groups that share a training reward."""
        shared = {name: tuple(sorted(self.weights[name].items())) for name in self.names}
        return [
            [name for name in self.names if shared[name] == weights]
            for weights in dict.fromkeys(shared.values())
        ]

    @cached_property
    def reward_labels(self) -> dict[str, str]:
        """Return the names of rewards and image statistics in reports."""
        return labels(self.settings.rewards) | IMAGE_STATS

    @cached_property
    def whose(self) -> dict[str, str]:
        """Tell whether all, some or no methods trained on a reward, as far as is known."""
        rewards = self.settings.evaluation.rewards
        trained = {name: [name in on for on in self.weights.values()] for name in rewards}
        some = {
            name: "trained on by some" if any(trained[name]) else "held out" for name in rewards
        }
        return {name: "trained on" if all(trained[name]) else some[name] for name in rewards}

    @property
    def outside(self) -> list[str]:
        """Return the rewards that not all entries were trained on."""
        everyones = lambda reward: all(reward in self.weights[name] for name in self.names)
        rewards = self.settings.evaluation.rewards
        return [name for name in rewards if not (self.names and everyones(name))]

    @property
    def few(self) -> bool:
        """Tell whether methods are compared in every reward, not only in the training reward."""
        return len(self.names) <= 3


@dataclass(frozen=True, kw_only=True)
class Sources:
    """Where the report's numbers are."""

    runs: Path
    """A folder, as are evaluations and prompts."""
    evaluations: Path
    prompts: Path
    quality: Path
    """What the stage `models` measured of each model."""
    timings: Path
    """A folder of the seconds of training."""
    page: Path
    """The report's folder, to which links are relative."""
    locks: tuple[Path, ...]
    """DVC's."""


def read_scores(compared: Compared, run: Run, evaluations: Path) -> pd.DataFrame:
    """Read one evaluation's rows.

    UserError if its table is missing, damaged or another run's, or lacks rewards, checkpoints or
    numbers of steps.
    """
    file = existing(evaluations / evaluation_folder(*run) / "results.parquet")
    table, settings = read_table(file, SCORES), compared.settings.evaluation
    if not len(table) or set(zip(table.method, table.seed)) != {run}:
        raise UserError(complaint(file, f"does not hold the scores of {run_name(*run)} alone"))
    checkpoints = settings.checkpoints if run[0] in compared.names else ("final",)
    wanted = product(map(str, checkpoints), settings.steps, settings.rewards)
    there = set(zip(table.checkpoint, table.steps, table.reward))
    for checkpoint, steps, reward in sorted(set(wanted) - there):
        what = f"has no scores of {reward} at {steps} steps of checkpoint {checkpoint}"
        raise UserError(complaint(file, what))
    return table


def read_seconds(
    names: Sequence[str], seeds: Sequence[int], timings: Sequence[Path], labels: Mapping[str, str]
) -> dict[str, dict[str, float]]:
    """Read the seconds of training until each iteration's end, by a method's label.

    They are means over seeds and folders of timings. Methods with a run that was made elsewhere,
    without timings here, are left out. UserError if a file is damaged.
    """
    seconds = {}
    for folder, name, seed in product(timings, names, seeds):
        file = folder / f"{run_name(name, seed)}.json"
        of_run = read_json(file, dict).get("seconds") if file.exists() else {}
        if not isinstance(of_run, dict) or not all(
            key.isdecimal() and type(of_run[key]) in (int, float) for key in of_run
        ):
            raise UserError(complaint(file, "holds no seconds of iterations"))
        seconds[labels[name], file] = pd.Series(of_run, dtype=float)
    runs = pd.DataFrame(seconds).T.groupby(level=0, sort=False)
    means = {label: of_label.mean(skipna=False).dropna().round(3) for label, of_label in runs}
    return {
        label: shared[sorted(shared.index, key=int)].to_dict()
        for label, shared in means.items()
        if len(shared)
    }


def read_training_records(run: Run, folder: Path) -> pd.DataFrame:
    """Read the training records of a run; UserError if they are missing or damaged."""
    file = existing(folder / TRAINING_RECORDS)
    counts = ("iteration", "num_forward_evals", "num_transitions")
    if not len(read_table(file, dict.fromkeys(counts, COUNT))):
        raise UserError(complaint(file, "holds no training records"))
    return read_table(file)


def prompt_counts(folder: Path) -> str:
    """Return a sentence on the numbers of prompts, and on how many were left out of training.

    UserError if a prompt is in both sets.
    """
    files = [folder / f"{name}.parquet" for name in ("train", "test")]
    train, test = ([comparable(prompt.text) for prompt in load_prompts(file)] for file in files)
    if both := {*train} & {*test}:
        reason = f"has {len(both)} prompts that are also test prompts: nothing would be held out"
        raise UserError(complaint(files[0], reason))
    # What the stage `prompts` left out
    left_out = [left_out_of(file) for file in files]
    twice = sum(counts.get("twice", 0) for counts in left_out)
    tested = left_out[0].get("test prompts", 0)
    return (
        f"{len(train)} training prompts and {len(test)} test prompts; "
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
    trained = [name for name in (f"train@{run_name(*run)}" for run in runs) if name in stages]
    params = stages[trained[0]].get("params", {}) if trained else {}
    # The outputs of every stage, in the order of the pipeline
    wanted = [
        *("models", "prompts", "embed", "evaluate_base"),
        *(f"{stage}@{run_name(*run)}" for stage in ("train", "evaluate") for run in runs),
        *(["published"] if published else []),
        *(f"evaluate_published@{name}" for name in published),
    ]
    # A study's paths start in its own folder, a base's in one further down
    listed = lambda stage: ", ".join(
        f"{entry['path'].replace('../', '')} {entry['md5']}" for entry in stage.get("outs", [])
    )
    lines = [("code of training", params.get("reports/profile.yaml", {}).get("code.train"))]
    lines += [(f"dvc.lock {name}", listed(stages.get(name, {}))) for name in wanted]
    return [(name, hashes or "not in dvc.lock for this profile") for name, hashes in lines]


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


def measure(compared: Compared, sources: Mapping[int, Sources]) -> pd.DataFrame:
    """Read and compare evaluations and training records.

    sources: of each base, or of `BASE[1]`. UserError if some are missing, damaged or of other runs.
    Runs over bases are means over seeds, compared with their own base before training; their
    interval is over prompts, whose scores the table lacks.

    Returns the table of comparisons (`tables.py`), that checkpoint and number of steps first that
    reports use. Its attributes are what a report says beside it: `prompts`, how many test prompts;
    `prompt_counts`, a sentence; `models`, as `model_lines`; `versions`; `hashes`, as `locked`.
    """
    lines: list[dict] = []
    about: dict[int, dict] = {}
    for base, own in sources.items():
        apart = replace(compared, runs=list(product(compared.names, compared.seeds)))
        scores, records, about[base] = _read(apart, own)
        of_runs = [*tables.missing_lines(scores), *warning_lines(compared, records)]
        if compared.bases:
            of_runs = [line | {"seed": base} for line in of_runs] + seed_lines(scores, base)
            apart = replace(compared, runs=[(name, base) for name in compared.names])
            scores, records = mean_over_seeds(compared, base, scores, records)
        else:
            of_runs += [*learning_notes(compared, records), *prompt_lines(compared, scores)]
        lines += [
            *comparison_lines(apart, scores),
            *of_runs,
            *tables.training_lines(records),
            *ceiling_lines(own, base),
        ]
    # Part by part, as of one base
    lines.sort(key=lambda line: tables.PARTS.index(line["part"]))
    whose = lambda base: f"base {base}, " if compared.bases else ""
    of_all = {
        name: [(whose(base) + key, text) for base in about for key, text in about[base][name]]
        for name in ("hashes", "models")
    }
    table = tables.tabulate(lines, next(iter(about.values())) | of_all)
    return with_mean_base(compared, table) if compared.bases else table


def mean_over_seeds(
    compared: Compared, base: int, scores: pd.DataFrame, records: Mapping[Run, pd.DataFrame]
) -> tuple[pd.DataFrame, dict[Run, pd.DataFrame]]:
    """Return the means over seeds of every prompt's scores, and of every training record."""
    within = [name for name in SCORES if name not in ("seed", "score", "reason")]
    means = scores.groupby(within, sort=False, dropna=False).score.mean().reset_index()
    means["seed"] = [BASE[1] if is_base(method) else base for method in means.method]
    curves = {
        (name, base): pd.concat([records[name, seed] for seed in compared.seeds])
        .groupby("iteration", as_index=False)
        .mean()
        for name in compared.names
    }
    return means, curves


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


def with_mean_base(compared: Compared, table: pd.DataFrame) -> pd.DataFrame:
    """Replace each base before training by the mean of all, in the lines of runs over bases."""
    start = (table.part == "run") & table.method.map(is_base)
    keys = ["part", "checkpoint", "steps", "method", "reward"]
    over_bases = table[start].groupby(keys, sort=False)
    table.loc[start, "value"] = over_bases.value.transform(mean)
    table.loc[start, "missing"] = over_bases.missing.transform("sum")
    table = table[~(start & table.duplicated(keys))]
    evaluation = compared.settings.evaluation
    runs = tables.arranged(
        tables.part_of(table, "run"),
        checkpoint=map(str, evaluation.checkpoints),
        steps=evaluation.steps,
        method=[*compared.drawn, *compared.names],
    )
    return pd.concat([runs, table[table.part != "run"]], ignore_index=True)


def _read(
    compared: Compared, sources: Sources
) -> tuple[pd.DataFrame, dict[Run, pd.DataFrame], dict]:
    """Read the scores, the training records, and the table's attributes; errors as `measure`."""
    tables_of_runs = [read_scores(compared, run, sources.evaluations) for run in compared.evaluated]
    scores = pd.concat(tables_of_runs, ignore_index=True)
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
    bases = {run: (compared.bases_of[run[0]], BASE[1]) for run in compared.evaluated}
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
    if not compared.bases and len(compared.runs) <= 50:
        rewards = evaluation.rewards if compared.few else ()
        others += tables.pair_lines(results, compared.runs, rewards, weights)
        for group in compared.groups:
            runs = [run for run in compared.runs if run[0] in group]
            others += tables.matrix_lines(results, runs, weights[group[0]])
    yield from (line | first for line in others)


def ceiling_lines(sources: Sources, seed: int) -> Iterator[dict]:
    """Yield what the task's own pictures score, by reward; nothing where no task drew any."""
    file = sources.evaluations / run_name(*BASE) / CEILING
    if file.exists():
        line = {"part": "ceiling", "method": BASE[0], "seed": seed}
        yield from (
            line | {"reward": name, "value": own} for name, own in read_numbers(file).items()
        )


def learning_notes(compared: Compared, records: Mapping[Run, pd.DataFrame]) -> Iterator[dict]:
    """Yield what runs' records say of learning (`training/learning.py`), line by line.

    Nothing of records that are older than these columns.
    """
    for run, table in ((run, each) for run, each in records.items() if "rounded_share" in each):
        said = learning_lines(compared.entries[run[0]].training, table.to_dict("records"))
        for note in filter(None, [table.attrs.get("trained"), *said]):
            yield {"part": "learning", "method": run[0], "seed": run[1], "note": note}


def warning_lines(compared: Compared, records: Mapping[Run, pd.DataFrame]) -> Iterator[dict]:
    """Yield the warnings of drift in runs' records, with the iteration at which each began."""
    for (method, seed), table in records.items():
        entry, about = compared.entries[method], {"part": "warning", "method": method, "seed": seed}
        updates = entry.method.num_updates(entry.sampling.steps)
        for iteration, text in history(table.to_dict("records"), entry.training, updates):
            yield about | {"iteration": iteration, "note": text}
