"""Find the trained runs of a profile and their weights."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from g2rpo_core.config import Profile, load_profile, load_study, profile_path
from g2rpo_core.config.drawn import bases_for
from g2rpo_core.foundation.errors import UserError
from g2rpo_core.foundation.files import read_json, read_yaml
from g2rpo_core.foundation.runs import (
    BASE,
    TRAINING_RECORDS,
    check_one_kind,
    hash_of,
    is_base,
    read_lock,
    start_of,
)
from g2rpo_core.foundation.texts import natural
from g2rpo_core.hub.model_store import LOCK, ModelStore
from g2rpo_core.rewards.registry import REWARDS
from g2rpo_core.sampling.settings import SamplingSettings
from g2rpo_core.weights.stored import UNREAD

RUNS = Path("runs")
Kind = Literal["transformer", "lora"]


@dataclass(frozen=True)
class Place:
    """Where a run's folder is in this checkout's pipeline."""

    folder: Path
    profile: str
    study: str | None

    @property
    def evaluation(self) -> Path:
        """Return the folder with the run's evaluation, beside that of the base's."""
        home = (
            Path("studies", self.study, "evaluations")
            if self.study
            else Path("evaluations", self.profile)
        )
        return home / self.folder.name

    def was_evaluated(self) -> bool:
        """Tell whether the evaluation is of the weights that the folder has now.

        By the hash in DVC's lock; for a run that it does not know, by which of the two was written
        first.
        """
        results, records = self.evaluation / "results.parquet", self.folder / TRAINING_RECORDS
        if not results.exists():
            return False
        home = Path("studies", self.study) if self.study else Path(".")
        lock, path = home / "dvc.lock", self.folder.relative_to(home).as_posix()
        stages = read_lock(lock) if lock.exists() else {}
        evaluated = stages.get(f"evaluate@{self.folder.name}", {}).get("deps", [])
        if known := [dep["md5"] for dep in evaluated if dep["path"] == path]:
            return known == [hash_of(self.folder)]
        return records.exists() and records.stat().st_mtime <= results.stat().st_mtime


def find_place(folder: Path) -> Place | None:
    """Locate a run of this checkout by its folder; None for another folder, such as a copy."""
    name = folder.absolute().name
    for own in [*RUNS.glob(f"*/{name}"), *Path("studies").glob(f"*/runs/{name}")]:
        if own.exists() and own.samefile(folder):
            study = own.parts[1] if own.parts[0] == "studies" else None
            named = (
                read_yaml(Path("studies", study, "params.yaml"))["profile"]
                if study
                else own.parts[1]
            )
            return Place(own, named, study)
    return None


def find_kind(folder: Path) -> Kind | None:
    """Return whether a run has whole weights or a LoRA; None for neither, UserError for both."""
    check_one_kind(folder)
    return next((kind for kind in get_args(Kind) if (folder / kind).is_dir()), None)


def trained_runs(profile: str) -> list[str]:
    """List the names of the profile's runs that have weights, in natural order."""
    found = (
        path.name
        for path in (RUNS / profile).glob("*")
        if any((path / kind).is_dir() for kind in get_args(Kind))
    )
    return sorted(found, key=natural)


def find_weights(run: str, profile: str) -> Path | None:
    """Return the folder or file with a run's weights, for `weights_in`; None for the base.

    run: the name of a run such as `g2rpo-1`, or of published weights that were fetched, or a path:
    a run's, or one with a transformer or a LoRA of others. UserError if there are none, or if they
    are of a study's base, which has models of its own.
    """
    if run == BASE[0]:
        return None
    for folder in (RUNS / profile / run, Path(run)):
        if find_kind(folder):
            home = folder.absolute().parent.parent
            if home.name.startswith("base-") and (home / "models").is_dir():
                raise UserError(
                    f"{run}: was trained on a base of a study, with the models in "
                    f"{home / 'models'}, not on that of profile {profile}"
                )
            return folder
    if (Path("published", profile, run) / LOCK).exists():
        return ModelStore(Path("published", profile, run), "published").weights(run)
    if any(
        file.suffix in (".safetensors", *UNREAD)  # what is refused by name, too
        for file in (Path(run), *Path(run).rglob("*"))
    ):
        return Path(run)
    trained = trained_runs(profile)
    train = "" if trained else ": `make reproduce` trains its runs"
    raise UserError(
        f"{run}: no trained weights; profile {profile} has {', '.join([BASE[0], *trained])}{train}"
    )


def sampling_of(run: str, name: str, profile: Profile) -> SamplingSettings:
    """Return the settings that draw a run's images: those that it was trained with.

    run: as in `find_weights`; name, profile: the profile that is used, whose own settings draw the
    base and the weights of others. A run of another profile, or of a study, has those of its own.
    """
    entry, marked, seed = run.rpartition("-")
    if marked and seed.isdecimal() and entry in profile.methods or run in profile.published:
        return profile.sampling_of(entry if entry in profile.methods else run)
    # Also a snapshot of a run, or the folder of its weights
    path = Path(run).absolute()
    places = (
        [place for each in [path, *path.parents][:3] if each.name and (place := find_place(each))]
        if run != BASE[0]
        else []
    )
    if not places:
        return profile.sampling
    place = places[0]
    if place.study or place.profile != name:
        profile = load_profile(
            profile_path(place.profile), load_study(place.study) if place.study else None
        )
    return profile.sampling_of(place.folder.name.rpartition("-")[0])


def find_start(start: str | None, name: str, profile: Profile) -> Path | None:
    """Return the weights of a `training.start`; None for those of the base model.

    name, profile: the profile that is used. UserError, with the stage that fetches them, if they
    are not here.
    """
    if start is None:
        return None
    folders = [
        start_of(Path("published", name), each)
        for each in profile.methods
        if profile.run(each).training.start == start
    ]
    return ModelStore(
        next((each for each in folders if (each / LOCK).exists()), folders[0]), "published"
    ).weights(start)


def drawn_as(
    runs: Iterable[str], name: str, profile: Profile, guidance: float | None = None
) -> dict[str, tuple[str, SamplingSettings]]:
    """Return how to draw runs side by side: name of the images -> run, and its sampling settings.

    The base is drawn as the runs beside it are, once for each way (`name_bases`). guidance: in
    place of every run's own.
    """
    runs, given = list(runs), {} if guidance is None else {"guidance": guidance}
    own = {
        run: sampling_of(run, name, profile).model_copy(update=given)
        for run in runs
        if run != BASE[0]
    }
    bases = bases_for(profile.sampling.model_copy(update=given), own.values())
    named = [bases.items() if run == BASE[0] else [(run, own[run])] for run in runs]
    return {
        name: (BASE[0] if is_base(name) else name, settings)
        for each in named
        for name, settings in each
    }


def tiny_rewards(names: list[str], models: Path) -> str | None:
    """Return a note if scores come from small models trained here, not from published ones.

    models: the folder of the stage `models`.
    """
    if not (models / LOCK).exists():  # rewards computed by a server need none
        return None
    entries = read_json(models / LOCK, dict)
    read = dict.fromkeys(
        model for name in names if name in REWARDS for model in REWARDS[name].models[:1]
    )
    tiny = [REWARDS[model].label for model in read if "folder" in entries.get(model, {})]
    return f"tiny models, not {', '.join(tiny)}" if tiny else None
