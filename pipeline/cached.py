"""Look up DVC's cache: what it would restore, and finished runs that it does not have."""

import filecmp
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from dvc.dependency.param import ParamsDependency
from dvc.exceptions import DvcException
from dvc.stage.cache import RunCacheNotFoundError
from dvc_data.hashfile.hash_info import HashInfo
from dvc_data.hashfile.meta import Meta

from g2rpo_core.foundation.errors import UserError
from g2rpo_core.foundation.runs import SCRATCH, TRAINING_RECORDS
from stages.dvc import commit_command, load_stage

Params = Callable[[ParamsDependency], dict[str, Any]]
Coming = Mapping[
    str, str | None
]  # an output of a stage that is due -> its hash after that; None: not known before


def is_stored(cache: Path, md5: str) -> bool:
    """Say whether the cache has a file, or a folder with all its files."""
    file = cache / md5[:2] / md5[2:]
    return file.exists() and (
        not md5.endswith(".dir")
        or all(is_stored(cache, part["md5"]) for part in json.loads(file.read_text()))
    )


def unstored(out: Any) -> bool:
    """Say whether DVC's cache lacks what an output of a stage is now; False if there is nothing."""
    return (
        out.use_cache
        and out.exists
        and not is_stored(Path(out.repo.cache.local.path), out.get_hash().value)
    )


def restorable(stage: Any, params: Params, coming: Coming) -> dict[str, str] | None:
    """Return the output hashes that DVC would restore for a stage, or None if it may run it.

    params: the values of a parameter file as they will be then. The stage in memory is changed,
    nothing on disk is.
    """
    try:
        for dep in stage.deps:
            path = Path(dep.def_path)
            if isinstance(dep, ParamsDependency):
                # As DVC does
                dep.hash_info = HashInfo("params", params(dep))  # type: ignore[arg-type]
            elif coming.get(str(path)):
                dep.hash_name, dep.hash_info, dep.meta = (
                    "md5",
                    HashInfo("md5", coming[str(path)]),
                    Meta(),
                )
            elif any(
                coming[out] is None
                for out in coming
                if path.is_relative_to(out) or Path(out).is_relative_to(path)
            ):
                return None
            else:
                dep.save()
        for out in stage.outs:
            out.hash_info = HashInfo()  # or DVC asks its lock, which is of the last run
        stage.repo.stage_cache.restore(stage, dry=True)
    except (DvcException, RunCacheNotFoundError):
        return None
    return {
        out["path"]: out["md5"] for out in stage.repo.stage_cache._load(stage)["outs"]
    }  # it has no public look-up


def check_kept(project: Path, stage: str) -> None:
    """Raise UserError if a finished run would be lost when DVC starts its training again.

    It is safe in DVC's cache, or in the scratch folder, from which the training publishes it again.
    DVC itself removes it without a word.
    """
    if not stage.startswith("train@"):
        return
    for out in load_stage(stage, project).outs:
        run = Path(out.fs_path)
        if (run / TRAINING_RECORDS).exists() and not in_scratch(run) and unstored(out):
            raise UserError(
                f"{out}: DVC would remove this finished run, and its cache does not have it: "
                "keep it by "
                f"`{commit_command(stage, project)}`, or move it away"
            )


def in_scratch(run: Path) -> bool:
    """Say whether a scratch folder holds this finished run."""
    of_run = SCRATCH.glob(f"train/**/{run.name}/*/out/{TRAINING_RECORDS}")
    return any(filecmp.cmp(file, run / TRAINING_RECORDS, shallow=False) for file in of_run)
