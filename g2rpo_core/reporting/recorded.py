"""Write and read a study's results.parquet; docs/howto/studies.md describes its columns."""

from itertools import product
from pathlib import Path

import pandas as pd

from g2rpo_core.config.comparisons import TRAINING
from g2rpo_core.evaluation.results import LABELS as IMAGE_STATS
from g2rpo_core.evaluation.results import SCORES
from g2rpo_core.foundation.errors import UserError
from g2rpo_core.foundation.files import complaint, read_text, reading
from g2rpo_core.foundation.runs import is_base, run_name
from g2rpo_core.foundation.tables import read_table
from g2rpo_core.reporting.measured import Compared
from g2rpo_core.reporting.tables import DTYPES, part_of

ABOUT = ("prompts", "prompt_counts", "models", "versions")  # kept as the table's attributes


def write_results(path: Path, table: pd.DataFrame) -> None:
    """Write the table of comparisons without `matrix` and hashes, which are in runs.txt."""
    kept = table[table.part != "matrix"]
    kept.attrs = {name: table.attrs[name] for name in ABOUT}
    kept.to_parquet(path, index=False, compression="zstd")


def read_results(path: Path) -> pd.DataFrame:
    """Read the table of a study; UserError if it is missing, damaged or lacks a column."""
    table = read_table(path)
    if lacking := [name for name in ("seed", *DTYPES) if name not in table]:
        raise UserError(complaint(path, f"has no column {lacking[0]!r}"))
    return table


def scores_in(table: pd.DataFrame) -> pd.DataFrame:
    """Return the scores by prompt (`SCORES`), or else one mean per run and reward."""
    scores = part_of(table, "prompt")
    if not len(scores):
        means = (table.part == "run") & (table.reward != TRAINING)
        scores = table[means & ~table.reward.isin(IMAGE_STATS)]
    return scores.rename(columns={"value": "score", "note": "reason"})[[*SCORES]]


def read_measured(compared: Compared, path: Path, hashes: Path) -> pd.DataFrame:
    """Read from a study's table what `measure` returned; hashes: runs.txt, one line per run.

    UserError if the table is missing or damaged, or lacks what its params.yaml names. Other runs
    are left out.
    """
    table = read_results(path)
    with reading(path):
        about = {name: table.attrs[name] for name in ABOUT}
    evaluation, lines = compared.settings.evaluation, part_of(table, "run")
    keys = ["checkpoint", "steps", "method", "seed", "reward"]
    there = set(lines[keys].itertuples(index=False, name=None))
    variants = product(evaluation.checkpoints, evaluation.steps, compared.evaluated)
    wanted = [(str(checkpoint), steps, *run) for checkpoint, steps, run in variants]
    for variant in wanted:
        needed = [*evaluation.rewards, *([] if is_base(variant[2]) else [TRAINING])]
        if lacking := [name for name in needed if (*variant, name) not in there]:
            raise UserError(complaint(path, f"has no {lacking[0]} of {run_name(*variant[2:])}"))
    records = part_of(table, "training")
    if lacking := [run for run in compared.runs if run not in {*zip(records.method, records.seed)}]:
        raise UserError(complaint(path, f"has no training records of {run_name(*lacking[0])}"))
    # The parts whose order is that of params.yaml
    runs = pd.DataFrame(wanted, columns=keys[:4]).merge(lines)
    records = pd.DataFrame(compared.runs, columns=["method", "seed"]).merge(records)
    others = table[~table.part.isin(["run", "training"])]
    parts = [part[table.columns].astype(table.dtypes) for part in (runs, others, records)]
    table = pd.concat(parts, ignore_index=True)
    hashed = [line.partition(" ") for line in read_text(hashes).splitlines()]
    table.attrs = about | {"hashes": [(run, text) for run, _, text in hashed]}
    return table
