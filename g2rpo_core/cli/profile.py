"""`g2rpo profile show`: a profile as it is put together, with where each value comes from."""

import sys
from argparse import ArgumentParser, Namespace

from pydantic import BaseModel
from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap, CommentedSeq

from g2rpo_core.config import load_profile, method_of, profile_path, resolve
from g2rpo_core.config.profile import Profile

WIDTH = 130


def add_parser(commands) -> None:
    """Adds `profile` to the commands of g2rpo."""
    parser: ArgumentParser = commands.add_parser("profile", help="a profile, resolved", description=__doc__)
    actions = parser.add_subparsers(required=True, metavar="action")
    show = actions.add_parser("show", help="print the whole profile, with where each value comes from", description=__doc__)
    show.add_argument("name", help="a file of profiles/")
    show.set_defaults(run=run)


def run(args: Namespace) -> None:
    path = profile_path(args.name)
    shown = annotated(load_profile(path), resolve(path).origin)
    yaml = YAML(typ="rt", pure=True)
    yaml.width = WIDTH
    yaml.representer.add_representer(type(None), lambda self, _: self.represent_scalar("tag:yaml.org,2002:null", "null"))
    yaml.dump(shown, sys.stdout)


def annotated(profile: Profile, origin: dict[str, str]) -> CommentedMap:
    """Every setting of the profile, those of methods with their published values, each with a comment on where it comes from."""
    data = {name: getattr(profile, name) for name in type(profile).model_fields}
    data["methods"] = {
        name: {**run.model_dump(mode="json", exclude={"settings"}), "settings": method_of(profile.methods, name)}
        for name, run in profile.methods.items()
    }
    return _annotated(data, "", origin)


def _annotated(value: BaseModel | dict, prefix: str, origin: dict[str, str]) -> CommentedMap:
    """A mapping whose leaves have comments: the `file:line` that says them, or that they are a default or a published setting."""
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
