"""Reads profiles as plain data, with all that they extend.

It is light, so that a process can look into a profile before it imports torch. A profile is
`profiles/<name>.yaml`, read as YAML 1.2 (as DVC does; YAML 1.1 takes 1e-5 for a string). With
`extends:` it inherits from another profile and overrides it key by key; null removes an inherited
key.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from g2rpo_core.foundation.errors import UserError
from g2rpo_core.foundation.files import read_yaml_with_lines
from g2rpo_core.foundation.settings import checked_name

OF_BASE = "/base-"  # between a study's name and one of its bases: `my_study/base-2`


@dataclass(frozen=True)
class Resolved:
    """A resolved profile."""

    data: dict
    """Its sections, as JSON values."""
    origin: dict[str, str]
    """Dotted key of a value (`training.iterations`) -> the `file:line` that sets it."""


def profile_path(name: str) -> Path:
    """Return the path of a profile; UserError for a name that would lead out of its folder."""
    return Path("profiles") / f"{checked_name(name, 'profile')}.yaml"


def study_path(name: str) -> Path:
    """Return the path of a study, or of a base's study; UserError if the name leaves its folder."""
    return Path("studies", checked_name(name.partition(OF_BASE)[0], "study"), "params.yaml")


def base_of(name: str) -> int | None:
    """Return the base in a name like `my_study/base-2`, or None; UserError if it is no number."""
    _, marked, base = name.partition(OF_BASE)
    if marked and not (base.isdecimal() and base.isascii()):
        raise UserError(f"study {name!r}: a base is a number, as in my_study{OF_BASE}2")
    return int(base) if marked else None


def folders_of(profile: str, study: str | None) -> tuple[Path, Path]:
    """Return the folders of models and embeddings: the profile's, or those of a study's base."""
    if study and OF_BASE in study:
        return Path("studies", study, "models"), Path("studies", study, "embeddings")
    return Path("models", profile), Path("embeddings", profile)


def read_chain(path: Path, keeps_null: Collection[str] = ()) -> Resolved:
    """Return a profile with everything that it extends.

    keeps_null: as in `override`. UserError in one line if a file is missing, damaged or extends
    itself.
    """
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
            if not isinstance(parent, str):
                raise UserError(
                    f"{file}: extends: must be the name of one profile (got {str(parent)[:60]!r})"
                )
            chain.append(file.with_name(f"{checked_name(parent, f'{file}: extends')}.yaml"))
    resolved = Resolved({}, {})
    for _, layer in reversed(layers):
        resolved = override(resolved, layer, keeps_null)
    return resolved


def override(under: Resolved, over: Resolved, keeps_null: Collection[str] = ()) -> Resolved:
    """Return `under`, overridden by `over` mapping by mapping; a null brings the default back.

    keeps_null: keys whose null is a value.
    """

    def merged(old: dict, new: dict) -> dict:
        result = dict(old)
        for key, value in new.items():
            if value is None and old.get(key) is not None and key not in keeps_null:
                del result[key]
            elif isinstance(value, dict) and isinstance(old.get(key), dict):
                result[key] = merged(old[key], value)
            else:
                result[key] = value
        return result

    data = merged(under.data, over.data)
    origin = under.origin | over.origin
    for key in set(leaves(data)) - set(origin):  # mappings that a null has emptied
        if lines := [line for other, line in over.origin.items() if other.startswith(f"{key}.")]:
            origin[key] = lines[0]
    return Resolved(data, {key: origin[key] for key in leaves(data) if key in origin})


def leaves(data: Mapping, prefix: str = "") -> dict[str, object]:
    """Return the values within nested mappings by dotted key; an empty mapping is a value."""
    flat: dict[str, object] = {}
    for key, value in data.items():
        nested = isinstance(value, Mapping) and value
        flat |= leaves(value, f"{prefix}{key}.") if nested else {f"{prefix}{key}": value}
    return flat


def _read(path: Path) -> tuple[dict, dict[str, str]]:
    """Return a YAML file's data, and `file:line` of each of its leaves."""
    if not path.exists():
        known = sorted(file.stem for file in path.parent.glob("[!.]*.yaml"))
        raise UserError(
            f"{path}: no such profile; there are {', '.join(known) or 'none in that folder'}"
        )
    data, lines = read_yaml_with_lines(path)
    if not isinstance(data, dict):
        raise UserError(f"{path}: must be a mapping of sections")
    return data, {key: f"{path}:{line}" for key, line in lines.items()}
