"""Generate the reference pages from the code, by the templates in tools/pages.

python -m tools.reference            writes docs/reference/settings.md, which is committed
python -m tools.reference commands   prints a page that is built with the site instead: commands,
                                     methods, published_settings, bases, api
"""

import argparse
import importlib
import io
import json
import os
import re
import sys
import textwrap
from collections import defaultdict
from collections.abc import Callable
from contextlib import redirect_stdout, suppress
from functools import partial, reduce
from pathlib import Path
from typing import Any
from unittest.mock import patch

import typer
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from pydantic.json_schema import models_json_schema
from ruamel.yaml import YAML
from typer.cli import get_docs_for_click

from g2rpo_core.algorithm.methods import SPECS, Method
from g2rpo_core.architectures.architecture import Architecture
from g2rpo_core.architectures.table import ARCHITECTURES
from g2rpo_core.cli.checkout import COMMANDS
from g2rpo_core.cli.commands import app
from g2rpo_core.config import load_profile
from g2rpo_core.config.load import MainRun, Study
from g2rpo_core.config.profile import Profile
from g2rpo_core.estimate.machines import Machines
from g2rpo_core.foundation.settings import Settings
from g2rpo_core.rewards.registry import REWARDS, CustomRewardSettings
from g2rpo_core.rewards.spec import RewardServerSettings
from g2rpo_core.tiny_models.settings import BASES

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "docs" / "reference"
PUBLISHED = YAML(typ="safe", pure=True).load(Path(__file__).with_name("published.yaml"))
TEMPLATES = Environment(
    loader=FileSystemLoader(Path(__file__).with_name("pages")),
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
PLAIN = {
    "integer": "integer",
    "number": "number",
    "string": "text",
    "boolean": "boolean",
    "null": "null",
}
LIMITS = {"exclusiveMinimum": ">", "minimum": "≥", "exclusiveMaximum": "<", "maximum": "≤"}
NO_LIMIT = 10**9
OPTIONAL = "; optional"  # null, or a section whose settings have defaults
EXAMPLE = re.compile(r"\s+Example: ([^\n]+(?:\n[^\n]+)*)")
STARTED = {  # what passes its options to argparse: the module with its `main`, and a first word
    **{f"g2rpo {name}": (module,) for name, (module, _, _) in COMMANDS.items()},
    "python -m studies": ("studies.__main__",),
    "python -m studies run": ("studies.__main__", "run"),
    "python -m studies new": ("studies.__main__", "new"),
    "python -m flows.serve": ("flows.serve",),
}


def render(page: str, **context: Any) -> str:
    """Fill the template of a page."""
    text = TEMPLATES.get_template(f"{page}.md.j2").render(context)
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"


def all_profiles() -> dict[str, Profile]:
    """Load every committed profile, by name."""
    return {path.stem: load_profile(path) for path in sorted((ROOT / "profiles").glob("*.yaml"))}


# The page of settings, from pydantic's JSON schema


def settings_page() -> str:
    """Return the page of settings."""
    own = (MainRun, Study, Profile, Method, CustomRewardSettings, RewardServerSettings)
    described = dict.fromkeys([*own, *(spec.settings for spec in REWARDS.values())])
    classes = models_json_schema([(each, "validation") for each in described])[1]["$defs"]
    return render("settings", section=Sections(classes).describe, classes=classes, rewards=REWARDS)


class Sections:
    """Describes classes of settings; a line that an earlier section has is only named."""

    def __init__(self, classes: dict[str, dict]):
        self.classes = classes
        self.may_change = {each.__name__: sorted(each.how) for each in subclasses(Settings)}
        self.first: dict[tuple[str, str], str] = {}  # (key, line) -> title
        self.described: set[str] = set()

    def describe(
        self, title: str, name: str, about: str = "", level: int = 2, known: tuple[str, ...] = ()
    ) -> str:
        """Return a section on a class, and one on each class that its fields hold, but `known`."""
        own = self.classes[name]
        lines: dict[str, list[str]] = defaultdict(list)
        repeated: dict[str, list[str]] = defaultdict(list)
        inner: dict[str, list[str]] = defaultdict(list)
        self.described.add(name)
        for key, field in own["properties"].items():
            line = self.line(field, key in own.get("required", ()))
            first = self.first.setdefault((key, line), title)
            (lines[line] if first == title else repeated[first]).append(f"`{key}`")
            for held in references(field):
                if held not in self.described | {*known} and key not in inner[held]:
                    inner[held].append(key)
        parts = [f"{'#' * level} {title}", about or paragraphs(own["description"])]
        if how := self.may_change[name]:
            parts.append(f"A resumed run may change {', '.join(f'`{key}`' for key in how)}.")
        listed = [f"- {', '.join(keys)} {line}" for line, keys in lines.items()]
        listed += [f"- as in *{first}*: {', '.join(keys)}" for first, keys in repeated.items()]
        parts.append("\n".join(listed))
        for held, (first, *others) in ((held, keys) for held, keys in inner.items() if keys):
            several = sum(first in keys for keys in inner.values()) > 1
            heading = ", ".join([f"{title}.{first}", *others])
            heading += self.kind(held) if several else ""
            parts.append(self.describe(heading, held, level=min(level + 1, 4)))
        return "\n\n".join(parts)

    def line(self, field: dict, required: bool) -> str:
        """Return a field's type, default and description; a section describes itself."""
        kind, default = type_of(field), field.get("default")
        shown = f"; default `{json.dumps(default, ensure_ascii=False)}`".replace('"', "")
        if default is None or (isinstance(default, dict) and "type" not in field):
            kind, shown = (kind if required else kind.replace(" or null", "")), OPTIONAL
        about = field.get("description", "")
        described = f": {about}" if about or not references(field) else ""
        return f"({kind}{'' if required else shown}){described}"

    def kind(self, name: str) -> str:
        """Return the key that tells a section from others in its place: ` (branching: each)`."""
        fields = self.classes[name]["properties"].items()
        consts = (f" ({key}: {field['const']})" for key, field in fields if "const" in field)
        return next(consts, "")


def subclasses(of: type) -> set[type]:
    """Return all classes that derive from one."""
    return {each for own in of.__subclasses__() for each in (own, *subclasses(own))}


def references(schema: dict) -> list[str]:
    """Return the names of the classes in a schema, at any depth."""
    return re.findall(r'"\$ref": "#/\$defs/(\w+)"', json.dumps(schema))


def type_of(schema: dict | bool) -> str:
    """Return a type in plain English, with its range."""
    if isinstance(schema, bool) or not schema.keys() - {"title", "description", "default"}:
        return "anything"
    if "$ref" in schema:
        return "section"
    if options := schema.get("anyOf") or schema.get("oneOf"):
        return " or ".join(dict.fromkeys(map(type_of, options)))
    if words := schema.get("enum") or ([schema["const"]] if "const" in schema else ()):
        return ", ".join(f"`{word}`" for word in words)
    if schema["type"] == "array":
        return f"list of {type_of(schema.get('items') or schema['prefixItems'][0])}"
    if schema["type"] == "object":
        keys = type_of(schema.get("propertyNames", {}) | {"type": "string"})
        return f"mapping of {keys} to {type_of(schema['additionalProperties'])}"
    limits = ((sign, schema[key]) for key, sign in LIMITS.items() if key in schema)
    words = (f", {sign} {number(value)}" for sign, value in limits if value != NO_LIMIT)
    return PLAIN[schema["type"]] + "".join(words)


def number(value: float) -> str:
    """Return a limit as people write it."""
    if value == 2**64:
        return "2⁶⁴"
    return f"{value:g}" if isinstance(value, float) else f"{value:,}"


def paragraphs(text: str) -> str:
    """Join the lines of each paragraph."""
    return "\n\n".join(" ".join(part.split()) for part in text.split("\n\n"))


# The pages of commands and methods


def commands_page() -> str:
    """Return the page of commands."""
    group = typer.main.get_command(app)
    described = get_docs_for_click(obj=group, ctx=typer.Context(group), name="g2rpo", indent=1)
    described = re.sub(r"^(#+) `(.+)`$", r"\1 \2", described, flags=re.MULTILINE)
    described = EXAMPLE.sub(lambda it: f"\n\n```\n{' '.join(it[1].split())}\n```", described)
    targets = re.findall(r"^([a-z-]+):.*## (.*)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    helps = {command: help_of(command, *words) for command, words in STARTED.items()}
    return render("commands", described=described, helps=helps, targets=targets)


def help_of(command: str, module: str, *words: str) -> str:
    """Return what a command whose module has a `main` prints with --help."""
    printed, main = io.StringIO(), importlib.import_module(module)
    with (
        patch.object(sys, "argv", [command, *words, "--help"]),
        patch.dict(os.environ, COLUMNS="100"),
        patch.object(main, "SIDE_BY_SIDE", 2, create=True),  # else that of this machine
        redirect_stdout(printed),
        suppress(SystemExit),
    ):
        main.main()
    return printed.getvalue().strip()


def methods_page() -> str:
    """Return the page of published methods: what each sets, by name."""
    set_by = {
        spec: spec.settings.model_dump(mode="json", exclude_defaults=True)
        | ({"training": {"clip_range": spec.clip_range}} if spec.clip_range else {})
        for spec in SPECS
    }
    return render("methods", set_by=set_by, flow=lambda value: json.dumps(value).replace('"', ""))


# The pages of base models and published settings


def bases_page() -> str:
    """Return the page of base models: a table of repositories for each architecture."""
    profiles, of_repo = all_profiles(), defaultdict(dict)
    for name, profile in profiles.items():
        if profile.models.source == "hub":
            of_repo[profile.models.repos["pipeline"].repo][name] = profile
    twins = {
        BASES[profile.models.base]: name
        for name, profile in reversed(profiles.items())
        if name.startswith("tiny")
    }
    return render(
        "bases",
        bases=[(base, twins[base.pipeline.__name__]) for base in ARCHITECTURES.values()],
        of_repo=of_repo,
        smallest=smallest,
        guidance=guidance,
        licence=licence,
    )


def machines_of(profile: str) -> Machines | None:
    """Return the machines that the comment of a profile of published models names."""
    text = (ROOT / "profiles" / f"{profile}.yaml").read_text()
    options = r"--gpus (\d+)(?: --nodes (\d+))? --memory ([\d.]+)"
    said = re.search(rf"rehearse --profile {profile} {options}`", text)
    return Machines(int(said[1]), float(said[3]), int(said[2] or 1)) if said else None


def smallest(profiles: dict[str, Profile], lora: bool) -> str:
    """Return the profile for the machines with the least memory, and these machines."""
    named = {
        name: machines
        for name, profile in profiles.items()
        if bool(profile.training.lora) == lora and (machines := machines_of(name))
    }
    if not named:
        return "yes, in a profile of your own"
    name, least = min(named.items(), key=lambda item: item[1].gpus * item[1].memory)
    return f"`{name}`: {least.gpus} × {least.memory:g} GiB"


def guidance(base: Architecture, repo: str) -> str:
    """Return how a repository's model is guided."""
    for least in (0, 1):
        if base.forward_evals(least + 0.5) > 1:
            return f"classifier-free above {least}"
    embeds = base.published[repo].transformer.get("guidance_embeds")
    return "an input of the model" if embeds else "none"


def licence(base: Architecture, repo: str) -> str:
    """Return the licence of a repository's weights."""
    about = next(about for start, about in base.licences.items() if repo.startswith(start))
    return about.get("license_name", about["license"])


def rows_of(profile: Profile, entry: str) -> list[dict[str, Any]]:
    """Return the rows of tools/published.yaml for an entry of a profile of published weights."""
    repo = profile.models.repos["pipeline"].repo if profile.models.source == "hub" else ""
    fits = lambda row: entry in row["methods"] and repo.startswith(tuple(row["of"]))
    found = [row for row in PUBLISHED["rows"] if fits(row)]
    # Where somebody has published the method on this base, nothing is taken in its place
    return [row for row in found if row["source"]] or found


def resolved_settings(profile: Profile, entry: str) -> Callable[[str], Any]:
    """Return a function of a dotted name: that setting of an entry as a JSON value, or None."""
    run = profile.run(entry)
    whole = {"sampling": run.sampling, "training": run.training, "evaluation": profile.evaluation}
    values = run.method.model_dump(mode="json")
    values |= {name: each.model_dump(mode="json") for name, each in whole.items()}
    return lambda name: reduce(lambda inner, key: (inner or {}).get(key), name.split("."), values)


def published_page() -> str:
    """Return the page of published settings: a table for each row of tools/published.yaml."""
    shown = lambda value: f"{value:g}" if isinstance(value, float) else str(value)
    tables = [(row, []) for row in PUBLISHED["rows"]]
    for profile in all_profiles().values():
        for entry in profile.methods:
            own = rows_of(profile, entry)
            for row, read in tables:
                if any(each is row for each in own):
                    read.append(resolved_settings(profile, entry))
    return render(
        "published_settings",
        tables=tables,
        reasons=PUBLISHED["reasons"],
        shown=shown,
        here=lambda read, setting: "; ".join(dict.fromkeys(shown(of(setting)) for of in read)),
        wrap=partial(textwrap.fill, width=150, break_long_words=False, break_on_hyphens=False),
    )


BUILT_PAGES = {
    "commands.md": commands_page,
    "methods.md": methods_page,
    "published_settings.md": published_page,
    "bases.md": bases_page,
    "api.md": partial(render, "api"),  # mkdocstrings fills it from docstrings
}


def main() -> None:
    """Write the committed page, or print another one."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    pages = {name.removesuffix(".md"): page for name, page in BUILT_PAGES.items()}
    parser.add_argument("page", nargs="?", choices=pages, help="print this page instead")
    if chosen := parser.parse_args().page:
        print(pages[chosen](), end="")
        return
    (FOLDER / "settings.md").write_text(settings_page())
    print(FOLDER / "settings.md")


if __name__ == "__main__":
    main()
