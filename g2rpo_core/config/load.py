"""Profiles, params.yaml and studies from their files: read, put together, checked as a whole before any work.

A profile is `profiles/<name>.yaml`, read as YAML 1.2 (as DVC reads it; YAML 1.1 takes 1e-5 for a text). It may name another by
`extends:`, over which it is laid key by key; a null takes an inherited key away. Stages depend on the sections that they load,
in `reports/profile.yaml`, which the stage `profile` writes: the profile as it was put together.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, ValidationError, model_validator
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from g2rpo_core.config.profile import MethodRun, Profile
from g2rpo_core.errors import UserError
from g2rpo_core.settings import Settings, first_problem


class Run(Settings):
    """Which profile, methods and seeds `dvc repro` runs."""

    profile: str
    methods: tuple[str, ...] = Field(min_length=1)
    seeds: tuple[Annotated[int, Field(ge=0)], ...] = Field(min_length=1)


class MainRun(Run):
    """`params.yaml`: also which of the profile's published models are evaluated, with runs of one's own or without."""

    methods: tuple[str, ...]
    published: tuple[str, ...] = ()

    @model_validator(mode="after")
    def _names_something(self):
        if not (self.methods or self.published):
            raise ValueError("methods: name at least one, or a published model by `published`")
        return self


class Study(Run):
    """`studies/<study>/params.yaml`: runs and a report of their own, by a profile with departures; its models are the profile's."""

    study: str
    title: str
    about: str = Field(description="what is compared and at what budgets, in the report's first lines")
    entries: dict[str, MethodRun] = Field(min_length=1, description="in the place of the profile's section methods")
    changes: dict[Literal["sampling", "rewards", "training", "evaluation"], dict[str, object]] = Field(
        {}, description="laid over these sections of the profile"
    )


@dataclass(frozen=True)
class Resolved:
    """A profile as it was put together: its data, and of every value (`training.iterations`) the `file:line` that says it."""

    data: dict
    origin: dict[str, str]


def load_profile(path: Path, study: Study | None = None) -> Profile:
    """UserError with file, key and what is allowed, in one line, if the file or anything in it is wrong; study: laid over it."""
    beside = f" with {study_path(study.study)}" if study else ""
    return _checked(resolve(path, study).data, Profile, f"{path}{beside}")


def resolve(path: Path, study: Study | None = None) -> Resolved:
    """The profile with all that it extends, and with a study's changes; UserError as `load_profile`."""
    chain = [path]
    layers: list[tuple[Path, Resolved]] = []
    while chain:
        file = chain.pop()
        data, origin = _read(file)
        parent = data.pop("extends", None)
        if any(file == other for other, _ in layers):
            raise UserError(f"{file}: extends: the profiles extend each other in a circle")
        layers.append((file, Resolved(data, origin)))
        if parent is not None:
            chain.append(file.with_name(f"{parent}.yaml"))
    resolved = Resolved({}, {})
    for _, layer in reversed(layers):
        resolved = _laid_over(resolved, layer)
    if study is None:
        return resolved
    where = str(study_path(study.study))
    entries = {name: entry.model_dump(mode="json", exclude_defaults=True) for name, entry in study.entries.items()}
    resolved = _laid_over(resolved, _of(study.changes, f"{where} changes"))
    without = Resolved(
        {**resolved.data, "methods": {}}, {k: v for k, v in resolved.origin.items() if k.split(".")[0] != "methods"}
    )
    return _laid_over(without, _of({"methods": entries}, f"{where} entries"))


def _laid_over(under: Resolved, over: Resolved) -> Resolved:
    """`over` laid over `under`, mapping by mapping."""

    def merged(old: dict, new: dict) -> dict:
        result = dict(old)
        for key, value in new.items():
            if value is None and key in old:
                del result[key]
            elif isinstance(value, dict) and isinstance(old.get(key), dict):
                result[key] = merged(old[key], value)
            else:
                result[key] = value
        return result

    data = merged(under.data, over.data)
    origin = under.origin | over.origin
    return Resolved(data, {key: origin[key] for key in _leaves(data) if key in origin})


def _leaves(data: object, prefix: str = "") -> list[str]:
    """The dotted keys of all values that are no filled mappings."""
    if not isinstance(data, dict) or not data:
        return [prefix]
    return [leaf for key, value in data.items() for leaf in _leaves(value, f"{prefix}.{key}" if prefix else str(key))]


def _of(data: dict, where: str) -> Resolved:
    return Resolved(data, dict.fromkeys(_leaves(data), where))


def _read(path: Path) -> tuple[dict, dict[str, str]]:
    """A YAML file's data, and `file:line` of each of its leaves."""
    if not path.exists():
        known = sorted(file.stem for file in path.parent.glob("*.yaml"))
        raise UserError(f"{path}: no such profile; there are {', '.join(known) or 'none in that folder'}")
    lines, data = _parsed(path, "rt"), _parsed(path, "safe")  # with the places of keys, and as plain values
    if not isinstance(data, dict):
        raise UserError(f"{path}: must be a mapping of sections")
    origin = {}

    def walk(node, prefix: str) -> None:
        for key, value in node.items():
            name = f"{prefix}.{key}" if prefix else str(key)
            if isinstance(value, dict) and value:
                walk(value, name)
            else:
                origin[name] = f"{path}:{node.lc.key(key)[0] + 1}"

    walk(lines, "")
    return data, origin


def _checked(data: object, schema, where: str):
    try:
        return schema.model_validate_json(json.dumps(data, default=str))
    except ValidationError as error:
        raise UserError(f"{where}: {first_problem(error, schema)}") from None


def _load(path: Path, schema):
    return _checked(_parsed(path, "safe"), schema, str(path))


def _parsed(path: Path, kind: Literal["rt", "safe"]):
    try:
        return YAML(typ=kind, pure=True).load(path.read_text())
    except FileNotFoundError:
        raise UserError(f"{path}: no such file") from None
    except YAMLError as error:
        raise UserError(f"{path}: not YAML: {' '.join(str(error).split())[:200]}") from None


def load_run(path: Path = Path("params.yaml")) -> MainRun:
    """`params.yaml`, checked against the profile that it names; UserError as `load_profile`."""
    run = _load(path, MainRun)
    profile = load_profile(profile_path(run.profile))
    for method in run.methods:
        if method not in profile.methods:
            raise UserError(
                f"{path}: methods: {method!r} is not in profiles/{run.profile}.yaml; allowed are {', '.join(profile.methods)}"
            )
    for name in run.published:
        if name not in profile.published:
            known = ", ".join(profile.published) or "none"
            raise UserError(
                f"{path}: published: {name!r} is not in section published of profiles/{run.profile}.yaml; there are: {known}"
            )
    return run


def load_study(name: str) -> Study:
    """A study's file, checked with the profile that it names; UserError as `load_profile`."""
    path = study_path(name)
    if not path.exists():
        known = sorted(file.parent.name for file in path.parents[1].glob("*/params.yaml"))
        raise UserError(f"{path}: no such study; there are {', '.join(known) or 'none in that folder'}")
    study = _load(path, Study)
    if study.study != name:
        raise UserError(f"{path}: study: must be the name of its folder, {name} (got {study.study!r})")
    load_profile(profile_path(study.profile), study)
    for method in study.methods:
        if method not in study.entries:
            raise UserError(f"{path}: methods: {method!r} is not in entries; allowed are {', '.join(study.entries)}")
    return study


def profile_path(name: str) -> Path:
    return Path("profiles") / f"{name}.yaml"


def study_path(name: str) -> Path:
    return Path("studies", name, "params.yaml")
