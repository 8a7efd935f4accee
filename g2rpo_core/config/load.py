"""Reads profiles, params.yaml and studies, resolves them, and checks them before any work.

The stage `profile` writes the resolved profile to `reports/profile.yaml`; the other stages depend
on the sections of it that they load.
"""

import json
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Literal, TypeVar

from pydantic import Field, ValidationError, field_validator, model_validator

from g2rpo_core.config.comparisons import TRAINING, Comparison, check_comparisons
from g2rpo_core.config.profile import MethodRun, Profile
from g2rpo_core.foundation.errors import UserError, attempt
from g2rpo_core.foundation.files import complaint, in_one_line, read_yaml
from g2rpo_core.foundation.profiles import (
    Resolved,
    base_of,
    leaves,
    override,
    profile_path,
    read_chain,
    study_path,
)
from g2rpo_core.foundation.settings import Different, EntryName, Name, Seed, Settings, problems_of
from g2rpo_core.rewards.registry import REWARDS, models_of

Cost = Literal["iterations", "evaluations", "compute", "seconds", "nothing"]
COSTS: dict[str, str] = {  # name in reports
    "iterations": "iterations",
    "evaluations": "forward evaluations in rollouts",
    "compute": "total compute",
    "seconds": "seconds",
    "nothing": "nothing",
}

# Settings whose null means none, not their default
KEEPS_NULL = {"max_reward_noise", "muon_rate", "samples", "shortest_edge"}

S = TypeVar("S", bound=Settings)
_override = partial(override, keeps_null=KEEPS_NULL)


class Run(Settings):
    """Which profile, methods and seeds `dvc repro` runs."""

    profile: Name = Field(description="File of profiles/ to run.")
    methods: Annotated[tuple[Name, ...], Different] = Field(
        min_length=1,
        description="Entries of the profile's section `methods`, in the report's order.",
    )
    seeds: Annotated[tuple[Seed, ...], Different] = Field(
        min_length=1, description="Seeds of training; every method is trained with each."
    )


class MainRun(Run):
    """`params.yaml`: a Run, and published models of the profile to evaluate, even without runs."""

    methods: Annotated[tuple[Name, ...], Different] = Field(
        description="Entries of the profile's section `methods`, in the report's order."
    )
    published: Annotated[tuple[Name, ...], Different] = Field(
        (), description="Entries of the profile's section `published`, evaluated with the runs."
    )

    @model_validator(mode="after")
    def _names_something(self):
        if not (self.methods or self.published):
            raise ValueError("methods: name at least one, or a published model in `published`")
        return self


class Study(Run):
    """`studies/<study>/params.yaml`: runs with a report of their own, by a profile with changes.

    The models are the profile's.
    """

    study: Name = Field(description="Name of its folder.")
    title: str = Field(description="The report's title.")
    about: str = Field(
        description="What is compared, at what budgets; shown in the report's first lines."
    )
    equal: Annotated[tuple[Cost, ...], Different] = Field(
        min_length=1,
        description=(
            "Costs that all runs share, or the runs of each part; "
            "`nothing` if budgets are what is compared."
        ),
    )
    bases: Annotated[tuple[Seed, ...], Different] = Field(
        (),
        description=(
            "`models.seed` of each base: every method is trained with each seed on each base, and "
            "the report infers over bases; none: the profile's own models."
        ),
    )
    entries: dict[EntryName, MethodRun] = Field(
        min_length=1, description="Replaces the profile's section methods."
    )
    changes: dict[Literal["sampling", "rewards", "training", "evaluation"], dict[str, object]] = (
        Field({}, description="Overrides these sections of the profile.")
    )
    comparisons: tuple[Comparison, ...] = Field(
        (),
        description=(
            "Comparisons named before the runs, and judged together: "
            "their intervals hold for all of them at once."
        ),
    )

    @field_validator("bases")
    @classmethod
    def _enough_to_infer(cls, value):
        if 0 < len(value) < 3:
            raise ValueError(
                "an interval over bases needs at least three, or none for the profile's own models"
            )
        return value

    @model_validator(mode="after")
    def _comparisons_can_be_judged(self):
        check_comparisons(self.comparisons, len(self.bases or self.seeds))
        return self


def load_profile(path: Path, study: Study | None = None, needed: Collection[str] = ()) -> Profile:
    """Load a profile, with a study's changes if given; needed: as in `resolve`.

    UserError in one line (file, key, what is allowed) if anything is wrong.
    """
    beside = f" with {study_path(study.study)}" if study else ""
    resolved = resolve(path, study, needed)
    return _checked(resolved.data, Profile, f"{path}{beside}", resolved.origin)


def section_of(path: Path, name: str, schema: type[S]) -> S | None:
    """Return a section of a profile whose other sections may be wrong; None if it is unreadable."""
    return attempt(
        lambda: schema.model_validate_json(json.dumps(resolve(path).data.get(name))),
        (UserError, ValidationError),
    )[0]


def resolve(path: Path, study: Study | None = None, needed: Collection[str] = ()) -> Resolved:
    """Return the profile with everything that it extends, and with a study's changes.

    An entry of `methods` that it inherits and that does not fit it is left out, unless `needed`.
    Of one of a study's bases, `models` has its seed, and builds no scorer that the study does not
    use. UserError as in `load_profile`.
    """
    resolved = read_chain(path, KEEPS_NULL)
    if study is None:
        return _without_misfits(path, resolved, needed)
    where = str(study_path(study.study))
    entries = {
        name: entry.model_dump(mode="json", exclude_defaults=True)
        for name, entry in study.entries.items()
    }
    resolved = _override(resolved, _of(study.changes, f"{where} changes"))
    without = Resolved(
        {**resolved.data, "methods": {}},
        {k: v for k, v in resolved.origin.items() if k.split(".")[0] != "methods"},
    )
    changed = _override(without, _of({"methods": entries}, f"{where} entries"))
    base = base_of(study.study)
    if base is None:
        return changed
    profile: Profile = _checked(changed.data, Profile, f"{path} with {where}", changed.origin)
    unused = {name: None for name in _scorers(profile) if name in changed.data["models"]}
    return _override(changed, _of({"models": {"seed": base, **unused}}, f"{where} bases"))


def _without_misfits(path: Path, resolved: Resolved, needed: Collection[str]) -> Resolved:
    """Leave out each entry of `methods` that is neither the file's own, nor needed, nor fits."""
    kept = {*needed} | {
        key.split(".")[1]
        for key, at in resolved.origin.items()
        if key.startswith("methods.") and at.startswith(f"{path}:")
    }
    try:
        Profile.model_validate_json(json.dumps(resolved.data))
    except ValidationError as error:
        problems = [each.split(".") for each in problems_of(error, Profile)]
        wrong = {keys[1].split(":")[0] for keys in problems if keys[0] == "methods"} - kept
        if wrong and wrong < resolved.data["methods"].keys():
            fitting = {k: v for k, v in resolved.data["methods"].items() if k not in wrong}
            return Resolved({**resolved.data, "methods": fitting}, resolved.origin)
    return resolved


def _scorers(profile: Profile) -> list[str]:
    """Return the scorers that no reward of the profile's trainings and evaluations needs."""
    trainings = [profile.training, *(profile.run(name).training for name in profile.methods)]
    judged = {
        *profile.evaluation.rewards,
        *(reward for each in trainings for reward in (*each.rewards, *each.monitor.rewards)),
    }
    needed = {model for reward in judged for model in models_of(profile.rewards, reward)}
    return [model for spec in REWARDS.values() for model in spec.models if model not in needed]


def _of(data: dict, where: str) -> Resolved:
    return Resolved(data, dict.fromkeys(leaves(data), where))


def _checked(data: object, schema, where: str, origin: Mapping[str, str] | None = None):
    try:
        return schema.model_validate_json(json.dumps(data))
    except ValidationError as error:
        raise UserError(complaint(where, in_one_line(problems_of(error, schema, origin)))) from None


def _load(path: Path, schema):
    return _checked(read_yaml(path), schema, str(path))


def _check_chosen(
    path: Path, key: str, names: tuple[str, ...], known: Collection[str], where: str
) -> None:
    if unknown := [repr(name) for name in names if name not in known]:
        is_are = "is" if len(unknown) == 1 else "are"
        raise UserError(
            f"{path}: {key}: {', '.join(unknown)} {is_are} not in {where}; "
            f"allowed are {', '.join(known) or 'none'}"
        )


def load_run(path: Path = Path("params.yaml")) -> MainRun:
    """Load `params.yaml`, checked against its profile; UserError as in `load_profile`."""
    run = _load(path, MainRun)
    profile = load_profile(profile_path(run.profile), needed=run.methods)
    _check_chosen(path, "methods", run.methods, profile.methods, f"profiles/{run.profile}.yaml")
    _check_chosen(
        path,
        "published",
        run.published,
        profile.published,
        f"section published of profiles/{run.profile}.yaml",
    )
    return run


def load_study(name: str) -> Study:
    """Load a study's file, checked with the profile that it names; UserError as `load_profile`.

    name: of its folder, or of one of its bases: `my_study/base-2`, which is then also the name of
    what is returned.
    """
    path, base = study_path(name), base_of(name)
    if not path.exists():
        known = sorted(file.parent.name for file in path.parents[1].glob("*/params.yaml"))
        raise UserError(
            f"{path}: no such study; there are {', '.join(known) or 'none in that folder'}"
        )
    study = _load(path, Study)
    if study.study != path.parent.name:
        raise UserError(
            f"{path}: study: must be the name of its folder, {path.parent.name} (got "
            f"{study.study!r})"
        )
    if base is not None and base not in study.bases:
        raise UserError(
            f"{path}: bases: there is no {base}, only "
            f"{', '.join(map(str, study.bases)) or 'the models of the profile'}"
        )
    study = study.model_copy(update={"study": name})
    profile = load_profile(profile_path(study.profile), study)
    if study.bases and profile.models.source == "hub":
        raise UserError(
            f"{path}: bases: profile {study.profile} downloads its models: "
            "only models that are built here have a seed"
        )
    _check_chosen(path, "methods", study.methods, study.entries, "entries")
    for number, comparison in enumerate(study.comparisons):
        _check_chosen(
            path,
            f"comparisons.{number}",
            (comparison.method, comparison.against),
            study.methods,
            "methods",
        )
        _check_chosen(
            path,
            f"comparisons.{number}.reward",
            (comparison.reward,),
            (TRAINING, *profile.evaluation.rewards),
            "rewards",
        )
    return study


def evaluated_together(
    profile: str, study: Study | None
) -> tuple[Sequence[str] | None, Sequence[str]]:
    """Return the entries and published weights to compare with the base: a study's or the run's.

    None, for every entry, if params.yaml names another profile: whichever is evaluated by hand then
    finds its base.
    """
    if study:
        return study.methods, ()
    if not Path("params.yaml").exists() or (run := load_run()).profile != profile:
        return None, ()
    return run.methods, run.published
