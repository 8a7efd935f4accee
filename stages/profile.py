"""Stage `profile`: writes the resolved profile, which holds the other stages' parameters."""

import io
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.nodes import ScalarNode
from ruamel.yaml.representer import SafeRepresenter

from g2rpo_core.config import (
    Profile,
    evaluated_together,
    load_profile,
    load_run,
    load_study,
    profile_path,
    resolve,
    study_path,
)
from g2rpo_core.foundation.files import write_whole
from stages.entry import arguments, ends_in_one_line
from stages.paths import run_paths
from stages.versions import versions


@ends_in_one_line
def main() -> None:
    args = arguments(__doc__, "profile", "study")
    study = load_study(args.study) if args.study else None
    if study is None:
        # The first stage of all: a mistake in params.yaml ends here, before any work
        load_run()
    path = profile_path(args.profile)
    load_profile(path, study)
    source = path if study is None else study_path(study.study)
    together = evaluated_together(args.profile, study)
    write_profile(
        run_paths(args.profile, args.study).reports / "profile.yaml",
        resolve(path, study).data,
        source,
        *together,
    )


def written_data(
    data: dict, methods: Iterable[str] | None = None, published: Iterable[str] = ()
) -> dict:
    """Return what this stage writes of a profile, with empty sections and `Profile.drawn`.

    Stages depend on those sections.
    """
    data = {
        "numerics": "native",
        **data,
        **{section: {} for section in ("rewards", "published") if section not in data},
    }
    profile = Profile.model_validate_json(json.dumps(data))
    typed = profile.model_dump(mode="json", by_alias=True)
    parts = {"settings": "method", "sampling": "sampling", "training": "training"}
    typed["methods"] = {
        name: {
            part: getattr(profile.run(name), of).model_dump(mode="json")
            for part, of in parts.items()
        }
        for name in profile.methods
    }
    return as_typed(data, typed) | {"drawn": profile.drawn(methods, published)}


def as_typed(given: Any, typed: Any) -> Any:
    """Return what is given, with each number as its setting has it: 1 as 1.0 where that is a float.

    To DVC, 1 and 1.0 are equal; but its run cache looks for another text.
    """
    if isinstance(given, dict) and isinstance(typed, dict):
        return {key: as_typed(value, typed.get(key)) for key, value in given.items()}
    if isinstance(given, list) and isinstance(typed, list) and len(given) == len(typed):
        return [as_typed(*pair) for pair in zip(given, typed)]
    return typed if given == typed else given


def write_profile(
    out: Path,
    data: dict,
    source: Path,
    methods: Iterable[str] | None = None,
    published: Iterable[str] = (),
) -> None:
    """Write `written_data` and versions of code as YAML, in the order of the profile's files."""
    data = written_data(data, methods, published) | {"code": versions()}
    out.parent.mkdir(parents=True, exist_ok=True)
    yaml = YAML(typ="safe", pure=True)
    yaml.default_flow_style, yaml.sort_base_mapping_type_on_output = None, False
    yaml.allow_unicode, yaml.width = True, 130
    yaml.representer.add_representer(str, _quoted)
    text = io.StringIO(f"# Written by the stage `profile` from {source}.\n")
    text.seek(0, io.SEEK_END)
    yaml.dump(data, text)
    write_whole(out, text.getvalue())


def _quoted(representer: SafeRepresenter, value: str) -> ScalarNode:
    """Quote what holds ":" or "?", as a reward's class: DVC's parser refuses it between braces."""
    quoted = '"' if {":", "?"} & set(value) else None
    return representer.represent_scalar("tag:yaml.org,2002:str", value, style=quoted)


if __name__ == "__main__":
    main()
