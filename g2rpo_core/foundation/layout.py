"""Knows the layout of a checkout: which stage makes the files of which folder."""

import os
from pathlib import Path

FOLDERS = {  # of the pipeline -> the stage that makes what is in them
    "models": "models",
    "prompts": "prompts",
    "embeddings": "embed",
    "published": "published",
    "runs": "train",
    "evaluations": "evaluate",
}


def hint_for(path: Path | str) -> str:
    """Return the command that regenerates `path`, or "" if there is none.

    path: relative to the working directory or below it, which is a checkout; or below the Hugging
    Face cache.
    """
    path = Path(path)
    if path.is_absolute():
        home = os.environ.get("HF_HOME", Path.home() / ".cache" / "huggingface")
        if any(map(path.is_relative_to, (home, os.environ.get("HF_HUB_CACHE", home)))):
            return (
                "dvc repro --force --single-item models (or published) checks it, and mends it or "
                "says what to delete"
            )
        if not path.is_relative_to(Path.cwd()):
            return ""
        path = path.relative_to(Path.cwd())
    parts, repro = path.parts, "dvc repro"
    of_a_study = parts[:1] == ("studies",) and len(parts) > 2
    if of_a_study:
        repro, parts = f"cd {Path(*parts[:2])} && dvc repro", parts[2:]
    match parts:
        case ("dvc.lock",):
            return f"restore it with git checkout, or delete it: {repro} writes it again"
        case ("results.parquet" | "runs.txt" | "seconds.json",) if of_a_study:
            return "restore it with git checkout, or run the study again"
        case (".cache", "resume", *_):
            return f"delete {path}, and the same command resumes from what is left"
        case ("reports", "revisions", _):
            return (
                f"restore it with `git checkout {path}`, or delete it to look its commits up again"
            )
        case ("reports", "timings", _):
            return "delete it; it is needed for nothing but the report's axis of seconds"
        case ("reports", "report.json" | "machine.json"):
            stage = "report"
        case ("reports", "metrics", *rest):
            stage = _stage("evaluate", Path(*rest).stem)
        case (kind, *rest) if kind in FOLDERS:
            # A study's folders have no level for the profile
            of_a_run = rest if of_a_study else rest[1:]
            stage = _stage(FOLDERS[kind], of_a_run[0] if of_a_run else "")
        case _:
            return ""
    return f"the stage `{stage}` makes it: {repro} {stage}"


def _stage(stage: str, run: str) -> str:
    """Return a stage with its entry of the matrix; run: the name of a run, or empty."""
    if stage not in ("train", "evaluate") or not run:
        return stage
    if run == "base-0":
        return "evaluate_base"
    method = run.rpartition("-")[0]
    if stage == "evaluate" and any(Path("published").glob(f"*/{method}")):
        return f"evaluate_published@{method}"
    return f"{stage}@{run}"
