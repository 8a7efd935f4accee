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
from g2rpo_core.foundation.runs import SCRATCH, TRAINING_RECORDS, hash_of
from stages.dvc import commit_command, load_stage

Params = Callable[[ParamsDependency], dict[str, Any]]
Coming = Mapping[
    str, str | None
]  # an output of a stage that is due -> its hash after that; None: not known before


def not_stored(cache: Path, md5: str) -> Path | None:
    """Return the first file of a file or folder that the cache lacks, or has with other bytes.

    None: it has all. DVC looks at no byte of a cached file that is read-only, as all are.
    """
    file = cache / md5[:2] / md5[2:]
    if not file.is_file() or hash_of(file) != md5.removesuffix(".dir"):
        return file
    parts = json.loads(file.read_text()) if md5.endswith(".dir") else []
    return next(filter(None, (not_stored(cache, part["md5"]) for part in parts)), None)


def unstored(out: Any) -> str:
    """Say why DVC's cache cannot give back what an output of a stage is now; "" if it can.

    Also if there is nothing.
    """
    if not (out.use_cache and out.exists):
        return ""
    file = not_stored(Path(out.repo.cache.local.path), out.get_hash().value)
    if file and file.exists():
        return f"whose copy in DVC's cache is damaged (delete {file})"
    return "which DVC's cache does not have" if file else ""


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
        if (run / TRAINING_RECORDS).exists() and not in_scratch(run) and (why := unstored(out)):
            raise UserError(
                f"{out}: DVC would remove this finished run, {why}: keep it by "
                f"`{commit_command(stage, project)}`, or move it away"
            )


def in_scratch(run: Path) -> bool:
    """Say whether a scratch folder holds this finished run."""
    of_run = SCRATCH.glob(f"train/**/{run.name}/*/out/{TRAINING_RECORDS}")
    return any(filecmp.cmp(file, run / TRAINING_RECORDS, shallow=False) for file in of_run)
