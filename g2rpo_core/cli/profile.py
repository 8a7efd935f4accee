"""`g2rpo profile`: lists the profiles, shows one with the source of each value, and compares two."""

import sys
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from pydantic import BaseModel
from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap, CommentedSeq

from g2rpo_core.errors import UserError
from g2rpo_core.files import read_text
from g2rpo_core.texts import visible

if TYPE_CHECKING:  # imports torch, which would slow down --help
    from g2rpo_core.config import Profile

WIDTH = 130


app = typer.Typer(name="profile", help="List, show or compare profiles.", no_args_is_help=True)


@app.command("list")
def list_profiles() -> None:
    """List the profiles of this folder, each with the first sentence of its comment.

    Example: g2rpo profile list
    """
    for path in sorted(Path("profiles").glob("*.yaml")):
        try:
            lines = read_text(path).splitlines()
        except UserError as error:  # still list the others
            print(f"{path.stem:16} {error}")
            continue
        comment = " ".join(line[1:].strip() for line in takewhile(lambda line: line.startswith("#"), lines))
        print(f"{path.stem:16} {visible(comment.split('. ')[0].rstrip('.'))}")


@app.command("show")
def show(name: Annotated[str, typer.Argument(help="name of a file in profiles/")]) -> None:
    """Show the whole profile, with the source of each value.

    Example: g2rpo profile show flux_hps
    """
    from g2rpo_core.config import load_profile, profile_path, resolve

    path = profile_path(name)
    shown = annotated(load_profile(path), resolve(path).origin)
    yaml = YAML(typ="rt", pure=True)
    yaml.width = WIDTH
    yaml.representer.add_representer(type(None), lambda self, _: self.represent_scalar("tag:yaml.org,2002:null", "null"))
    yaml.dump(shown, sys.stdout)


@app.command("diff")
def diff(
    first: Annotated[str, typer.Argument(help="name of a file in profiles/")],
    second: Annotated[str, typer.Argument(help="another")],
) -> None:
    """Show the settings in which two profiles differ, one per line: key, first value, second value.

    Example: g2rpo profile diff flux_hps flux_lora_1gpu
    """
    from g2rpo_core.config import load_profile, profile_path

    both = [_settings(load_profile(profile_path(name))) for name in (first, second)]
    for name in dict.fromkeys([*both[0]["methods"], *both[1]["methods"]]):
        if sum(name in one["methods"] for one in both) == 1:  # whole, not setting by setting
            for one in both:
                one["methods"][name] = "there" if name in one["methods"] else "not there"
    values = [dict(_leaves(one)) for one in both]
    for key in dict.fromkeys([*values[0], *values[1]]):
        before, after = (str(one[key]) if key in one else "-" for one in values)
        if before != after:
            print(f"{key}: {before} -> {after}")


def _leaves(value: dict, prefix: str = "") -> Iterator[tuple[str, object]]:
    for key, field in value.items():
        inner = field.model_dump(mode="json") if isinstance(field, BaseModel) else field
        if isinstance(inner, dict) and inner:
            yield from _leaves(inner, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", inner


def annotated(profile: "Profile", origin: dict[str, str]) -> CommentedMap:
    """Every setting of the profile, each with a comment on its source; methods have all their published settings."""
    return _annotated(_settings(profile), "", origin)


def _settings(profile: "Profile") -> dict:
    """Every section, the methods with their published settings."""
    from g2rpo_core.config import method_of

    data = {name: getattr(profile, name) for name in type(profile).model_fields}
    data["methods"] = {
        name: {**run.model_dump(mode="json", exclude={"settings"}), "settings": method_of(profile.methods, name)}
        for name, run in profile.methods.items()
    }
    return data


def _annotated(value: BaseModel | dict, prefix: str, origin: dict[str, str]) -> CommentedMap:
    """A mapping with a comment on each leaf: the `file:line` that sets it, `default`, or `published`."""
    items = {name: getattr(value, name) for name in type(value).model_fields} if isinstance(value, BaseModel) else dict(value)
    shown = CommentedMap()
    for key, field in items.items():
        name = f"{prefix}.{key}" if prefix else key
        if isinstance(field, BaseModel) or (isinstance(field, dict) and field):
            shown[key] = _annotated(field, name, origin)
            continue
        shown[key] = CommentedSeq(field) if isinstance(field, tuple | list) else field
        if isinstance(shown[key], CommentedSeq):
            shown[key].fa.set_flow_style()
        inherited = "published" if name.startswith("methods.") and ".settings." in name else "default"
        shown.yaml_add_eol_comment(origin.get(name, inherited), key)
    return shown
