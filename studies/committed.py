"""Make and compare what is committed of a study's runs: runs.txt (hashes) and seconds.json.

No hash covers the seconds.
"""

import hashlib
import io
import json
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import pandas as pd

from g2rpo_core.config import Study
from g2rpo_core.foundation.files import read_json
from g2rpo_core.foundation.runs import hash_of, read_lock, run_name
from pipeline.verify import committed_text

# Of the main project, or a base's own
INPUTS = ("../../models/", "../../embeddings/", "models", "embeddings")


def hashes_in(lock: Path, here: bool = False) -> pd.DataFrame:
    """Read every run's hashes from DVC's lock: code, settings, inputs, weights and scores.

    here: weights and scores by their bytes, and only of runs that have them. UserError if the lock
    is damaged.
    """
    stages, runs = read_lock(lock), {}
    for name, evaluation in stages.items():
        group, _, run = name.partition("@")
        if group in ("evaluate", "evaluate_base"):
            # A run is its training, if there is one here, and its evaluation
            made = (
                [stages[f"train@{run}"], evaluation] if f"train@{run}" in stages else [evaluation]
            )
            deps = sorted(
                {
                    (dep["path"], dep["md5"])
                    for stage in made
                    for dep in stage["deps"]
                    if dep["path"].startswith(("..", *INPUTS))
                }
            )
            outs = [out for stage in made for out in stage["outs"]]
            places = [lock.parent / out["path"] for out in outs]
            if here and not all(place.exists() for place in places):
                continue
            md5s = map(hash_of, places) if here else (out["md5"] for out in outs)
            made_of = {out["path"].split("/")[0]: md5 for out, md5 in zip(outs, md5s)}
            runs[run or "base-0"] = {
                "code": _digest([dep for dep in deps if not dep[0].startswith(INPUTS)]),
                "settings": _digest([stage.get("params") for stage in made]),
                "inputs": _digest([dep for dep in deps if dep[0].startswith(INPUTS)]),
                "weights": made_of.get("runs", "-"),
                "scores": made_of["evaluations"],
            }
    return pd.DataFrame.from_dict(runs, orient="index").rename_axis("run")


def _digest(data: object) -> str:
    return hashlib.md5(json.dumps(data, sort_keys=True).encode()).hexdigest()[:12]


def read_committed(path: Path) -> pd.DataFrame:
    """Read the last commit's runs.txt; UserError as `committed_text`."""
    return pd.read_csv(io.StringIO(committed_text(path)), sep=" ", index_col="run", dtype=str)


def states(before: pd.DataFrame, now: pd.DataFrame) -> pd.Series:
    """Return for each earlier run `equal`, `different` or `missing`, and the hashes that changed.

    Weights and scores decide.
    """
    changed = before.ne(now.reindex(before.index))
    different = (
        changed[["weights", "scores"]].any(axis=1).map({False: "equal    ", True: "different"})
    )
    names = changed.apply(lambda row: ", ".join(row.index[row]), axis=1)
    return (different + " " + names).where(before.index.isin(now.index), "missing").str.strip()


def write_seconds(path: Path, study: Study, timings: Sequence[Path]) -> None:
    """Write each entry's median seconds of training, over seeds and folders of timings.

    Entries without timings here keep what the file says.
    """
    seconds = read_json(path, dict) if path.exists() else {}
    for method in study.methods:
        files = [
            folder / f"{run_name(method, seed)}.json" for folder in timings for seed in study.seeds
        ]
        if all(file.exists() for file in files):
            totals = [max(read_json(file, dict)["seconds"].values()) for file in files]
            seconds[method] = {"seconds": round(median(totals), 1), "runs": len(totals)}
    if seconds:
        path.write_text(json.dumps(seconds, indent=1) + "\n")
