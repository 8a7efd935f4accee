"""List, show and compare profiles, for `g2rpo profile`."""

import sys
from itertools import takewhile
from pathlib import Path

from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap, CommentedSeq

from g2rpo_core.config import Profile, load_profile, profile_path, resolve
from g2rpo_core.foundation.errors import UserError
from g2rpo_core.foundation.files import read_text
from g2rpo_core.foundation.profiles import leaves
from g2rpo_core.foundation.texts import echo

WIDTH = 130


def list_profiles() -> None:
    """Print each profile with the first sentence of its comment."""
    for path in sorted(Path("profiles").glob("[!.]*.yaml")):
        try:
            lines = read_text(path).splitlines()
        except UserError as error:  # still list the others
            echo(f"{path.stem:16} {error}")
            continue
        comment = " ".join(
            line[1:].strip() for line in takewhile(lambda line: line.startswith("#"), lines)
        )
        echo(f"{path.stem:16} {comment.split('. ')[0].rstrip('.')}")


def show(name: str) -> None:
    """Print the whole profile, with the source of each value."""
    path = profile_path(name)
    shown = _annotated(_settings(load_profile(path)), "", resolve(path).origin)
    yaml = YAML(typ="rt", pure=True)
    yaml.width = WIDTH
    yaml.representer.add_representer(
        type(None), lambda self, _: self.represent_scalar("tag:yaml.org,2002:null", "null")
    )
    yaml.dump(shown, sys.stdout)


def diff(first: str, second: str) -> None:
    """Print the settings in which two profiles differ."""
    both = [_settings(load_profile(profile_path(name))) for name in (first, second)]
    for name in dict.fromkeys([*both[0]["methods"], *both[1]["methods"]]):
        # an entry that only one of them has is listed as a whole, not setting by setting
        if sum(name in each["methods"] for each in both) == 1:
            for each in both:
                each["methods"][name] = "there" if name in each["methods"] else "not there"
    values = [leaves(each) for each in both]
    for key in dict.fromkeys([*values[0], *values[1]]):
        before, after = (str(each[key]) if key in each else "-" for each in values)
        if before != after:
            echo(f"{key}: {before} -> {after}")


def _settings(profile: Profile) -> dict:
    """Return every section, the methods with their published settings."""
    data = profile.model_dump(mode="json")
    for name, entry in data["methods"].items():
        del entry["settings"]  # those of the file: last are all, with the published ones
        entry["settings"] = profile.run(name).method.model_dump(mode="json")
    return data


def _annotated(items: dict, prefix: str, origin: dict[str, str]) -> CommentedMap:
    """Comment each leaf of a mapping: the `file:line` that sets it, `default`, or `published`."""
    shown = CommentedMap()
    for key, field in items.items():
        name = f"{prefix}.{key}" if prefix else key
        if isinstance(field, dict) and field:
            shown[key] = _annotated(field, name, origin)
            continue
        shown[key] = CommentedSeq(field) if isinstance(field, list) else field
        if isinstance(shown[key], CommentedSeq):
            shown[key].fa.set_flow_style()
        inherited = (
            "published" if name.startswith("methods.") and ".settings." in name else "default"
        )
        shown.yaml_add_eol_comment(origin.get(name, inherited), key)
    return shown
