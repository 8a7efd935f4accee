"""Finds and reads the report's numbers. If they are incomplete or of other runs, a UserError says how to make them again."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from types import SimpleNamespace

import pandas as pd

from g2rpo_core.common.runs import BASE, run_name
from g2rpo_core.data.prompts import left_out_of, load_prompts, normalized
from g2rpo_core.errors import UserError, made_by
from g2rpo_core.evaluation.results import SCORES
from g2rpo_core.files import complaint, read_json, read_table, remade_by
from g2rpo_core.reporting.tables import Run


@dataclass(frozen=True)
class Sources:
    """Where the report's numbers are: folders of runs, evaluations and prompts, the models' quality, DVC's locks.

    page: the report's folder, to which links are relative; repro: the command that runs a stage.
    """

    runs: Path
    evaluations: Path
    prompts: Path
    quality: Path
    page: Path
    locks: tuple[Path, ...]
    repro: str


def stage_of(run: Run, published: Sequence[str]) -> str:
    """The stage that evaluates a run, the base or published weights."""
    if run == BASE:
        return "evaluate_base"
    return f"evaluate_published@{run[0]}" if run[0] in published else f"evaluate@{run_name(*run)}"


def scores_of(run: Run, folder: Path, repro: str, published: Sequence[str] = ()) -> pd.DataFrame:
    """The rows of one evaluation; UserError if its table is missing, damaged or of another run."""
    stage = stage_of(run, published)
    file = made_by("evaluate", folder / "results.parquet", repro)
    again = remade_by(stage, repro)
    table = read_table(file, SCORES, again)
    if not len(table) or set(zip(table.method, table.seed)) != {run}:
        raise UserError(complaint(file, f"does not hold the scores of {run_name(*run)} alone", again))
    return table


def check_whole(
    results: pd.DataFrame, evaluated: Mapping[Run, Path], settings: SimpleNamespace, repro: str, published: Sequence[str]
) -> None:
    """Checks that evaluations have all rewards, checkpoints and numbers of steps that the report needs; UserError otherwise."""
    evaluation = settings.evaluation
    for (method, seed), folder in evaluated.items():
        table = results[(results.method == method) & (results.seed == seed)]
        checkpoints = ("final",) if (method, seed) == BASE or method in published else evaluation.checkpoints
        wanted = {
            (str(kept), steps, reward) for kept in checkpoints for steps in evaluation.steps for reward in evaluation.rewards
        }
        there = set(zip(table.checkpoint, table.steps, table.reward))
        if lacking := sorted(wanted - there):
            stage = stage_of((method, seed), published)
            what = f"has no scores of {lacking[0][2]} at {lacking[0][1]} steps of checkpoint {lacking[0][0]}"
            raise UserError(complaint(folder / "results.parquet", what, remade_by(stage, repro)))


def seconds_of(runs: Iterable[Run], timings: Path, labels: Mapping[str, str]) -> dict[str, dict[str, float]]:
    """Label of a method -> iteration -> seconds of training until its end, the mean over seeds.

    Without methods of which a run has no timings here, because it was made elsewhere. UserError if a file of timings is damaged.
    """
    by_method: dict[str, list[dict[str, float]]] = {}
    for run in runs:
        file, advice = timings / f"{run_name(*run)}.json", "delete it; it is needed for nothing but the report's axis of seconds"
        found = read_json(file, advice, dict).get("seconds") if file.exists() else {}
        if not isinstance(found, dict) or not all(key.isdecimal() and type(found[key]) in (int, float) for key in found):
            raise UserError(complaint(file, "holds no seconds of iterations", advice))
        by_method.setdefault(labels[run[0]], []).append(found)
    shared = {label: set.intersection(*map(set, found)) for label, found in by_method.items()}
    return {
        label: {iteration: round(mean(each[iteration] for each in found), 3) for iteration in sorted(shared[label], key=int)}
        for label, found in by_method.items()
        if shared[label]
    }


def records_of(run: Run, folder: Path, repro: str) -> pd.DataFrame:
    """The records of a run; UserError if they are missing or damaged."""
    again = remade_by(f"train@{run_name(*run)}", repro)
    file = made_by("train", folder / "records.parquet", repro)
    table = read_table(file, again=again)
    columns = {"iteration", "num_forward_evals", "num_transitions", "old_policy_ratio_error"}
    if not len(table) or not columns <= set(table.columns):
        raise UserError(complaint(file, "holds no training records", again))
    return table


def prompt_counts(folder: Path) -> str:
    """A sentence on the numbers of training and test prompts, and on what was left out so that no test prompt is trained on."""
    files = {name: folder / f"{name}.parquet" for name in ("train", "test")}
    sets = {name: load_prompts(file) for name, file in files.items()}
    both = {normalized(prompt.text).casefold() for prompt in sets["train"]} & {
        normalized(prompt.text).casefold() for prompt in sets["test"]
    }
    if both:
        reason = f"has {len(both)} prompts that are also test prompts: nothing would be held out"
        raise UserError(complaint(files["train"], reason, remade_by("prompts")))
    left_out = {name: left_out_of(file) for name, file in files.items()}
    twice = sum(counts.get("twice", 0) for counts in left_out.values())
    tested = left_out["train"].get("test prompts", 0)
    return (
        f"{len(sets['train'])} training prompts and {len(sets['test'])} test prompts; no text is in both ({tested} test prompts were left "
        f"out of training, and {twice} that a file had twice)"
    )


def model_lines(file: Path) -> list[tuple[str, str]]:
    """What the stage `models` measured of each model."""
    again = remade_by("models")
    quality = read_json(made_by("models", file), again, dict)
    for values in quality.values():
        if not isinstance(values, dict) or not all(isinstance(value, int | float) for value in values.values()):
            raise UserError(complaint(file, "holds no numbers of models", again))
    meaning = {
        "attribute": "right caption against one wrong attribute (chance 0.5)",
        "degraded": "clean against degraded image (chance 0.5)",
    }
    return [
        (
            name,
            "; ".join(
                f"{meaning.get(key, key)} {value:,}" if isinstance(value, int) else f"{meaning.get(key, key)} {value:.3f}"
                for key, value in values.items()
            ),
        )
        for name, values in quality.items()
    ]
