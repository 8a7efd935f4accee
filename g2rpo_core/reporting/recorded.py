"""Writes and reads a study's results.parquet: all that its report needs. docs/howto/studies.md describes its columns."""

from collections.abc import Iterator
from pathlib import Path

import pandas as pd

from g2rpo_core.config.comparisons import TRAINING
from g2rpo_core.evaluation.results import LABELS as IMAGE_STATS
from g2rpo_core.evaluation.results import SCORES
from g2rpo_core.foundation.errors import UserError
from g2rpo_core.foundation.files import complaint, read_table, read_text, reading
from g2rpo_core.foundation.runs import is_base, run_name
from g2rpo_core.reporting.measured import Compared, Measured
from g2rpo_core.reporting.statistics import Difference
from g2rpo_core.reporting.tables import Cell, Pair, Row, Run, StyleRow

VARIANT = ["method", "seed", "checkpoint", "steps"]
DTYPES = {
    **dict.fromkeys(("part", "method", "checkpoint", "reward", "style", "against", "prompt_id", "note"), "string"),
    **dict.fromkeys(("steps", "prompts", "missing", "pairs", "iteration"), "Int64"),
    **dict.fromkeys(("value", "difference", "low", "high", "standard_error", "win_rate"), "float64"),
}
ABOUT = ("prompts", "prompt_counts", "models", "versions")  # kept as the table's attributes
RATIO_ERROR = "old_policy_ratio_error"


def write_results(path: Path, compared: Compared, measured: Measured) -> None:
    """Write a study's table: means, differences, training records, and the scores by prompt that are at hand."""
    scores = measured.scores[measured.scores.reward.isin(compared.settings.evaluation.rewards)]
    scores = scores.rename(columns={"score": "value", "reason": "note"}).assign(part="prompt")
    table = pd.concat(
        [pd.DataFrame([*_comparisons(measured), *_training(measured), *measured.by_seed]), scores], ignore_index=True
    )
    table = table.drop(columns=["mean", "scores", "reason"], errors="ignore")
    table = table.reindex(columns=list(dict.fromkeys(["part", "method", "seed", *DTYPES, *table.columns]))).astype(DTYPES)
    table.attrs = {key: measured.about[key] for key in ABOUT}
    table.to_parquet(path, index=False, compression="zstd")


def _comparisons(measured: Measured) -> Iterator[dict]:
    """Yield a line for every mean and every difference."""
    first = measured.variants[0][:2]
    for checkpoint, steps, rows in measured.variants:
        for row in rows:
            stats = measured.stats.get((row.method, row.seed), {}) if (checkpoint, steps) == first else {}
            for reward, cell in (row.cells | stats).items():
                means = {"value": cell.mean, "missing": cell.missing}
                yield _line("run", row, (checkpoint, steps), reward, cell.difference) | means
            if row.trained:
                yield _line("run", row, (checkpoint, steps), TRAINING, row.trained)
    for style in measured.styles:
        yield _line("style", style, first, TRAINING, style.trained) | {"style": style.style, "prompts": style.prompts}
    for pair in measured.pairs:
        run = Row(pair.first, pair.seed, {}, None)
        yield _line("pair", run, first, pair.reward or TRAINING, pair.difference) | {"against": pair.second}
    for line in measured.missing:
        yield {"part": "missing", **line, "prompts": line["scores"], "note": line["reason"]}


def _line(part: str, run: Row | StyleRow, variant: tuple, reward: str, difference: Difference | None) -> dict:
    line = {"part": part, "method": run.method, "seed": run.seed, "checkpoint": str(variant[0]), "steps": variant[1]}
    gap = vars(difference) | {"difference": difference.mean} if difference else {}
    return line | {"reward": reward} | gap


def _training(measured: Measured) -> Iterator[dict]:
    """Yield a line for each record with held-out rewards, and for the last; then the warnings.

    What a report shows once for a run is in the last line: the largest ratio error, and the mean agreement of granularities.
    """
    for (method, seed), records in measured.records.items():
        heldout = list(records.filter(like="heldout_"))
        over_all = records.filter(regex="^(correlation|gap)_").mean().to_dict() | records.filter([RATIO_ERROR]).max().to_dict()
        kept = records[records[heldout].notna().any(axis=1) | (records.index == records.index[-1])]
        lines = kept[["iteration", "num_forward_evals", "num_transitions", *heldout]].to_dict("records")
        lines[-1] |= over_all
        yield from ({"part": "training", "method": method, "seed": seed} | line for line in lines)
    for (method, seed), iteration, text in measured.warnings:
        yield {"part": "warning", "method": method, "seed": seed, "iteration": iteration, "note": text}


def read_results(path: Path) -> pd.DataFrame:
    """Read the table of a study; UserError if it is missing, damaged or lacks a column."""
    table = read_table(path)
    if lacking := [name for name in ("seed", *DTYPES) if name not in table]:
        raise UserError(complaint(path, f"has no column {lacking[0]!r}"))
    return table


def scores_in(table: pd.DataFrame) -> pd.DataFrame:
    """Return the scores by prompt (`SCORES`); where none are at hand, one mean per run and reward, without a prompt_id."""
    scores = table[table.part == "prompt"]
    if not len(scores):
        scores = table[(table.part == "run") & (table.reward != TRAINING) & ~table.reward.isin(IMAGE_STATS)]
    return scores.rename(columns={"value": "score", "note": "reason"})[SCORES]


def gains_in(table: pd.DataFrame, reward: str = TRAINING) -> dict[Run, float]:
    """Return the gain over the base of every run in one reward, at the checkpoint and number of steps that come first."""
    runs = table[(table.part == "run") & (table.reward == reward) & ~table.method.map(is_base)]
    runs = runs.drop_duplicates(["method", "seed"])
    return dict(zip(zip(runs.method, runs.seed), runs.difference))


def read_measured(compared: Compared, path: Path, hashes: Path) -> Measured:
    """Read what `measure` returned when a study ran from its table; hashes: runs.txt, one line per run.

    UserError if the table is missing or damaged, or lacks what its params.yaml names.
    """
    table = read_results(path)
    with reading(path):
        parts = {part: lines.to_dict("records") for part, lines in table.groupby("part")}
        runs = {(*(line[key] for key in VARIANT), line["reward"]): line for line in parts["run"]}
        try:
            return Measured(
                variants=_variants(compared, runs),
                stats={run: _stats(compared, runs, run) for run in compared.runs},
                styles=[_style(line) for line in parts.get("style", ())],
                pairs=[_pair(line) for line in parts.get("pair", ())],
                matrices=[],
                missing=[line | {"scores": line["prompts"], "reason": line["note"]} for line in parts.get("missing", ())],
                records={run: _records(table, run) for run in compared.runs},
                warnings=[((line["method"], line["seed"]), line["iteration"], line["note"]) for line in parts.get("warning", ())],
                about={key: table.attrs[key] for key in ABOUT} | {"hashes": _hashes(hashes)},
                scores=table[table.part == "prompt"],
            )
        except KeyError as error:
            what = error.args[0]
            lacking = f"{what[-1]} of {run_name(*what[:2])}" if isinstance(what, tuple) else what
            raise UserError(complaint(path, f"has no {lacking}")) from None


def _variants(compared: Compared, runs: dict[tuple, dict]) -> list:
    """Build the rows of every checkpoint and number of steps; KeyError with what the table lacks."""

    def row(run: Run, checkpoint: str | int, steps: int) -> Row:
        cells = {name: _cell(runs[*run, str(checkpoint), steps, name]) for name in compared.settings.evaluation.rewards}
        return Row(*run, cells, None if is_base(run[0]) else _difference(runs[*run, str(checkpoint), steps, TRAINING]))

    return [
        (checkpoint, steps, [row(run, checkpoint, steps) for run in [*compared.base_runs, *compared.runs]])
        for checkpoint in compared.settings.evaluation.checkpoints
        for steps in compared.settings.evaluation.steps
    ]


def _style(line: dict) -> StyleRow:
    return StyleRow(line["method"], line["seed"], line["style"], line["prompts"], _difference(line))


def _pair(line: dict) -> Pair:
    reward = None if line["reward"] == TRAINING else line["reward"]
    return Pair(line["method"], line["against"], line["seed"], reward, _difference(line))


def _stats(compared: Compared, runs: dict[tuple, dict], run: Run) -> dict[str, Cell]:
    """Return the image statistics of a run that were measured."""
    evaluation = compared.settings.evaluation
    keys = {name: (*run, str(evaluation.checkpoints[0]), evaluation.steps[0], name) for name in IMAGE_STATS}
    return {name: _cell(runs[key]) for name, key in keys.items() if key in runs}


def _records(table: pd.DataFrame, run: Run) -> pd.DataFrame:
    """Return the training records of a run that the table has."""
    records = table[(table.part == "training") & (table.method == run[0]) & (table.seed == run[1])]
    if not len(records):
        raise KeyError((*run, "training records"))
    return records.dropna(axis=1, how="all").reset_index(drop=True)


def _cell(line: dict) -> Cell:
    return Cell(line["value"], line["missing"], None if pd.isna(line["difference"]) else _difference(line))


def _difference(line: dict) -> Difference:
    parts = ("difference", "low", "high", "standard_error", "win_rate", "pairs")
    return Difference(*(line[part] for part in parts))


def _hashes(path: Path) -> list[tuple[str, str]]:
    """Split the lines of a study's runs.txt: a run, and its hashes."""
    lines = [line.partition(" ") for line in read_text(path).splitlines()]
    return [(run, hashes) for run, _, hashes in lines]
