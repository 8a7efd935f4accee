"""Names the folders of a stage, and makes one anew."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

from g2rpo_core.foundation.files import read_yaml
from g2rpo_core.foundation.profiles import folders_of
from g2rpo_core.foundation.runs import start_of

REPORTS = Path("reports")
# Of profiles that params.yaml does not name, run by hand: git and DVC do not know it
OTHERS = REPORTS / "others"


@dataclass(frozen=True)
class RunPaths:
    """The folders of runs, evaluations and reports: those of params.yaml, or of a study."""

    name: str
    """The profile's, or `studies/NAME`."""
    runs: Path
    evaluations: Path
    reports: Path
    lock: Path
    """DVC's."""

    @property
    def timings(self) -> Path:
        """Return the folder of seconds, which DVC does not hash: they differ from run to run."""
        return self.reports / "timings"


def run_paths(profile: str, study: str | None) -> RunPaths:
    """Return the paths of the profile's own runs, or of a study or one of its bases with it.

    What has no profile in its path is of the profile that params.yaml names; that of another one is
    in OTHERS.
    """
    if study is None:
        params = Path("params.yaml")
        named = read_yaml(params) if params.exists() else {}
        reports = (
            REPORTS
            if not isinstance(named, dict) or named.get("profile", profile) == profile
            else OTHERS / profile
        )
        return RunPaths(
            profile, Path("runs", profile), Path("evaluations", profile), reports, Path("dvc.lock")
        )
    home = Path("studies", study)
    return RunPaths(
        str(home), home / "runs", home / "evaluations", home / "reports", home / "dvc.lock"
    )


def model_folders(args: SimpleNamespace) -> tuple[Path, Path]:
    """Return the folders of models and embeddings: the profile's, or those of a study's base.

    A base is `--study my_study/base-2`.
    """
    return folders_of(args.profile, args.study)


def training_inputs(args: SimpleNamespace, start: str | None) -> list[Path]:
    """Return the files and folders whose content decides a training, as dvc.yaml declares them.

    start: the setting `training.start`.
    """
    # Late, so that --help does not wait for the hub's client
    from g2rpo_core.hub.model_store import LOCK

    models, embeddings = model_folders(args)
    started = [] if start is None else [start_of(Path("published", args.profile), args.method)]
    return [models / LOCK, embeddings, *(published / LOCK for published in started)]


@contextmanager
def renewed(folder: Path, last: str) -> Iterator[Path]:
    """Make a folder anew in the block; if that fails, the old one is there as it was.

    So DVC removes outputs before a run. It may be a symlink, which stays. After a kill in the
    block, the next start puts the old one back first; last: the file that is written last, so that
    with it the new one is whole.
    """
    there = folder.resolve()
    old = there.with_name(f".{there.name}.old")
    if (there / last).exists():
        shutil.rmtree(old, ignore_errors=True)
    elif old.exists():
        shutil.rmtree(there, ignore_errors=True)
        old.rename(there)
    if there.exists():
        there.rename(old)
    try:
        there.mkdir(parents=True)
        yield folder
    except BaseException:
        shutil.rmtree(there, ignore_errors=True)
        if old.exists():
            old.rename(there)
        raise
    shutil.rmtree(old, ignore_errors=True)
