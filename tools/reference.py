"""Generates the reference pages from the code.

python -m tools.reference            writes docs/reference/settings.md, which is committed; a test holds it equal to the code
python -m tools.reference commands   prints a page that is built with the site and not committed: commands, methods, published_settings, bases, calls, api
"""

import argparse
import importlib
import inspect
import re
import sys
import textwrap
from collections.abc import Callable, Iterator
from functools import reduce
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin
from unittest.mock import patch

import annotated_types
import typer
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined
from ruamel.yaml import YAML
from typer.cli import get_docs_for_click

from g2rpo_core.algorithm.methods import SPECS, Method
from g2rpo_core.architectures.architecture import Architecture
from g2rpo_core.architectures.table import ARCHITECTURES
from g2rpo_core.cli.checkout import COMMANDS
from g2rpo_core.cli.commands import app
from g2rpo_core.config import load_profile
from g2rpo_core.config.load import MainRun, Study
from g2rpo_core.config.profile import MethodRun, Profile
from g2rpo_core.estimate.calls import calls_of
from g2rpo_core.estimate.machines import Machines
from g2rpo_core.rewards.registry import REWARDS, CustomRewardSettings
from g2rpo_core.rewards.spec import RewardServerSettings
from g2rpo_core.tiny_models.settings import BASES

PUBLISHED = YAML(typ="safe", pure=True).load(Path(__file__).with_name("published.yaml"))
FOLDER = Path(__file__).resolve().parent.parent / "docs" / "reference"
WRITTEN = "<!-- Written by `python -m tools.reference`; do not edit. -->"
PLAIN = {
    int: "integer",
    float: "number",
    str: "text",
    bool: "true or false",
    object: "anything",
    type(None): "null",
}
OF_THE_CHECKOUT = {  # what else is started from the checkout: the module with its `main`
    "python -m studies": "studies.__main__",
    "python -m flows.serve": "flows.serve",
}
OPTIONAL = "; optional"  # null, or a section whose settings have defaults
EXAMPLE = re.compile(r"\s+Example: ([^\n]+(?:\n[^\n]+)*)")
ACTIONS = {"python -m studies": ("run", "new")}

SETTINGS_HEAD = f"""{WRITTEN}

# Settings

Every setting of a profile, section by section, and of `params.yaml`, with type, range and default from the code. A setting without a default
is required; an optional one is null, or a section of defaults. A section is described below its parent. A profile that `extends:` another one inherits what it omits.

- To change a setting: [Change a setting](../howto/settings.md).
- To see the values of a whole profile and where each comes from: `g2rpo profile show tiny`.
- Words: [glossary](../glossary.md).
"""

CALLS_HEAD = """# Batch sizes of rollout and update

How many rows (latents) a call of the transformer has when a method samples an SDE step and when it trains on it, for each profile on the machines
that its comment names. If both are equal at every step, the ratio before the first update is exactly 1. If not, the GPU may choose another kernel, and
batches of different sizes round differently in bfloat16.

*Tolerated* is the relative difference between the two velocities at which |ratio − 1| leaves the clip range, at the method's most sensitive step. With
g, the velocity's weight in the transition's mean in standard deviations, and n elements of a latent, the largest |ratio − 1| of a run is about
4.5 g ε / √n + (g ε)² / 2. Classifier-free guidance adds the errors of its two evaluations. A run beyond it [warns](../metrics.md#drift) and continues.
[What an H100 measured](../../benchmarks/README.md#flux1-devs-shape): a difference of 0 between calls of 1 and 12 rows.
"""

PUBLISHED_HEAD = """# Published settings

For each method and base model: the published settings, the settings of our profiles, and the reason for every difference. Where nobody has published a
method on a base model, the page names the source used instead. A test compares every profile of published weights with this page.
"""
BASES_HEAD = """# Base models

What each published repository can be used for. *All weights* and *a LoRA* name the profile for the smallest machine on which every method fits,
by `g2rpo plan`. Not yet run on published weights. Guidance is the profile's; steps are those of its evaluation.

- [Another base model](../howto/base_model.md), and which of its values are not confirmed.
- [Export weights](../howto/export.md): what each form is for.
"""

API_HEAD = """# Python API

What a user extends or imports, with shapes, units and what is raised: the docstrings of these modules.

Axes of tensors: P prompts, B branches, J granularities, G members per group, R rewards, N images or latents, T steps.
"""
API = {  # the modules of each section, in g2rpo_core
    "Methods and training signals": [
        "algorithm.methods",
        "algorithm.tree",
        "algorithm.credit",
        "algorithm.objective",
        "algorithm.advantage",
        "algorithm.loss",
    ],
    "Sampling": ["sampling.schedule", "sampling.transitions", "sampling.ode"],
    "Rollouts": ["sampling.tree", "sampling.rollout"],
    "Rewards": ["rewards.spec", "rewards.registry"],
    "Architectures": ["architectures.architecture", "architectures.table"],
    "Models and images": ["models.policy", "models.generate"],
    "Prompts and profiles": ["data.prompts", "config.load"],
}
METHODS_HEAD = """# Methods

The settings of each method that differ from the defaults. `0 … 7` are step indices from the noisy end. The sources, and an entry to paste for each, are in
[From the papers to the code](papers.md).
"""
COMMANDS_HEAD = """# Commands

Every command with its options. Each one prints the same with `--help`.

| exit status | meaning |
|---|---|
| 0 | done |
| 1 | a mistake; one line on stderr says what is wrong, where, and what to do |
| 2 | an option or argument that the command does not have |
| 75 | the same command may succeed later: a server or the model hub did not answer |
| 143 | interrupted by Ctrl-C or SIGTERM; the same command resumes |

Run `. .venv/bin/activate` once in your shell, or write `.venv/bin/` before each command.
"""


def settings_page() -> str:
    """Return the page of settings."""
    # What a run and a study set, then the sections of a profile
    parts = [SETTINGS_HEAD]
    parts += _tables("params.yaml", MainRun, "What `dvc repro` runs.")
    parts += _tables(
        "params.yaml of a study", Study, "What `python -m studies run` runs.", known=(MethodRun,)
    )
    for name, field in Profile.model_fields.items():
        if name == "numerics":
            parts.append(
                f"## numerics\n\nOne word, {_cell(_type(field.annotation, []))}, "
                f"by default `{field.default}`. {field.description}.\n"
            )
        elif name == "models":
            for option in get_args(field.annotation):
                source = get_args(option.model_fields["source"].annotation)[0]
                parts += _tables(f"models ({source})", option)
        elif name == "rewards":
            parts.append(
                "## rewards\n\nSettings of built-in rewards by name, and rewards of your own: "
                "see [Rewards](../rewards.md).\n"
            )
            for reward, spec in REWARDS.items():
                parts += _tables(
                    f"rewards.{reward}",
                    spec.settings,
                    f"{spec.label}.",
                    level=3,
                    known=(RewardServerSettings,),
                )
            parts += _tables(
                "rewards, one of your own",
                CustomRewardSettings,
                level=3,
                known=(RewardServerSettings,),
            )
            parts += _tables("rewards.NAME.server", RewardServerSettings, level=3)
        elif name == "methods":
            parts += _tables("methods.NAME", MethodRun)
            parts += _tables("methods.NAME.settings", Method, level=3)
        elif name == "published":
            parts += _tables("published.NAME", next(_models(field.annotation)))
        else:
            parts += _tables(name, next(_models(field.annotation)))
    return "\n".join(_without_repeats(parts))


def _without_repeats(parts: list[str]) -> list[str]:
    """Name the settings that an earlier section of the same kind describes in the same words, such as those of another `tree` or `server`."""
    described: dict[
        tuple[str, str], str
    ] = {}  # (kind, line) -> the title of the section that has it
    out = []
    for part in parts:
        title = part.split("\n")[0].lstrip("# ")
        kind = re.sub(r" \([^)]*\)| of a study$", "", title).rpartition(".")[2]
        repeated: dict[str, list[str]] = {}
        kept = []
        for line in part.split("\n"):
            if line.startswith("- `") and kind != "NAME" and (kind, line) in described:
                repeated.setdefault(described[kind, line], []).append(
                    line.split(" (")[0].removeprefix("- ")
                )
            else:
                described.setdefault((kind, line), title)
                kept.append(line)
        end = "".join(
            f"- as in *{first}*: {', '.join(names)}\n" for first, names in repeated.items()
        )
        out.append(
            "\n".join(kept).rstrip("\n")
            + "\n"
            + ("" if kept[-2].startswith("- ") or not end else "\n")
            + end
        )
    return out


def commands_page() -> str:
    """Return the page of commands."""
    group = typer.main.get_command(app)
    described = get_docs_for_click(obj=group, ctx=typer.Context(group), name="g2rpo", indent=1)
    described = re.sub(r"^(#+) `(.+)`$", r"\1 \2", described, flags=re.MULTILINE)
    parts = [
        COMMANDS_HEAD,
        EXAMPLE.sub(lambda found: f"\n\n```\n{' '.join(found[1].split())}\n```", described),
    ]
    # Commands that hand their options to argparse, and what else is started from the checkout
    passed_on = {f"Options of g2rpo {name}": module for name, (module, _, _) in COMMANDS.items()}
    for command, module in (passed_on | OF_THE_CHECKOUT).items():
        parser = _parser(module, [])
        parts.append(f"## {command}\n\n{_text(parser.description)}\n")
        if command not in ACTIONS:
            parts.append(_options_table(_argparse_rows(parser)))
        for action in ACTIONS.get(command, ()):
            sub = next(
                each for each in parser._actions if isinstance(each, argparse._SubParsersAction)
            ).choices[action]
            parts.append(f"### {command} {action}\n\n{_options_table(_argparse_rows(sub))}")
    # The targets of make
    targets = re.findall(
        r"^([a-z-]+):.*## (.*)", (FOLDER.parent.parent / "Makefile").read_text(), re.MULTILINE
    )
    parts.append(
        "## make\n\n| target | what it does |\n|---|---|\n"
        + "".join(f"| `make {name}` | {about} |\n" for name, about in targets)
    )
    return "\n".join(parts)


def _tables(
    title: str, model: type[BaseModel], about: str | None = None, level: int = 2, known: tuple = ()
) -> list[str]:
    """Return a heading, the class's docstring, a list of its fields, and the same for each class that a field holds."""
    lines = [f"{'#' * level} {title}\n", (about or _text(model.__doc__)) + "\n"]
    if how := getattr(model, "how", None):
        lines.append(
            f"A resumed run may change {', '.join(f'`{name}`' for name in sorted(how))}.\n"
        )
    # One line for all fields of one description, and one section for all of one class
    described: dict[str, list[str]] = {}
    inner: list[tuple[str, type[BaseModel]]] = []
    for name, field in model.model_fields.items():
        key = field.alias or name
        kind, default = _type(field.annotation, list(field.metadata)), _default(field)
        if default == OPTIONAL:
            kind = kind.replace(" or null", "")
        described.setdefault(f"({kind}{default}): {_about(field)}", []).append(f"`{key}`")
        inner += [(key, each) for each in _models(field.annotation) if each not in known]
    lines += [f"- {', '.join(keys)} {text}" for text, keys in described.items()]
    out = ["\n".join(lines) + "\n"]
    for each in dict.fromkeys(each for _, each in inner):
        keys = [key for key, its_class in inner if its_class is each]
        kind = _kind(each) if sum(key == keys[0] for key, _ in inner) > 1 else ""
        out += _tables(
            ", ".join(f"{title}.{key}" if key == keys[0] else key for key in keys) + kind,
            each,
            level=min(level + 1, 4),
        )
    return out


def _kind(model: type[BaseModel]) -> str:
    """Return the key that tells a section from others in its place, such as ` (branching: each)`."""
    alone = (
        (key, field.annotation)
        for key, field in model.model_fields.items()
        if get_origin(field.annotation) is Literal
    )
    return next(
        (
            f" ({key}: {get_args(literal)[0]})"
            for key, literal in alone
            if len(get_args(literal)) == 1
        ),
        "",
    )


def _about(field: FieldInfo) -> str:
    """Return the field's description; of a section without one, the first sentence of its class."""
    return field.description or next(
        (_text(each.__doc__).split("\n")[0] for each in _models(field.annotation)), ""
    )


def _default(field: FieldInfo) -> str:
    """Return what stands behind a setting's type: its default, or that it is optional; nothing for a required one."""
    if field.is_required():
        return ""
    value = field.get_default(call_default_factory=True)
    if isinstance(value, BaseModel) or value is PydanticUndefined:
        return OPTIONAL
    if value is None:
        return OPTIONAL
    if isinstance(value, tuple):
        return "; default `[" + ", ".join(str(each) for each in value) + "]`"
    return f"; default `{str(value).lower() if isinstance(value, bool) else value}`"


def _type(annotation: Any, metadata: list[Any] | None = None) -> str:
    """Return a type in plain English, with its range."""
    limits = _range(metadata or [])
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _type(arguments[0], [*arguments[1:], *(metadata or [])])
    if origin is Literal:
        return "`" + "`, `".join(str(each) for each in arguments) + "`"
    if origin is Union or type(annotation).__name__ == "UnionType":
        return " or ".join(
            dict.fromkeys(
                _type(each, metadata if each is not type(None) else None) for each in arguments
            )
        )
    if origin is tuple:
        return f"list of {_type(arguments[0])}"
    if origin is dict:
        return f"mapping of {_type(arguments[0])} to {_type(arguments[1])}"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "section"
    return PLAIN.get(annotation, getattr(annotation, "__name__", str(annotation))) + limits


def _range(metadata: list[Any]) -> str:
    words = []
    for each in [
        inner
        for item in metadata
        for inner in (item.metadata if isinstance(item, FieldInfo) else [item])
    ]:
        # No limit that anybody meets
        if isinstance(each, annotated_types.Le) and each.le == 10**9:
            continue
        for name, sign in {"Gt": ">", "Ge": "≥", "Lt": "<", "Le": "≤"}.items():
            if type(each).__name__ == name:
                value = getattr(each, name.lower())
                words.append(
                    f"{sign} {'2⁶⁴' if value == 2**64 else f'{value:g}' if isinstance(value, float) else f'{value:,}'}"
                )
    return ", " + ", ".join(words) if words else ""


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    """Yield the settings classes that an annotation holds, at any depth."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    else:
        for each in get_args(annotation):
            yield from _models(each)


def methods_page() -> str:
    """Return the page of published methods: what each sets, by name."""
    rows = [METHODS_HEAD, "| method | settings |", "|---|---|"]
    for spec in SPECS:
        values = {
            name: (field, getattr(spec.settings, name))
            for name, field in Method.model_fields.items()
        }
        own = {
            name: value
            for name, (field, value) in values.items()
            if field.is_required() or value != field.default
        }
        shown = ", ".join(f"`{name}: {_value(value)}`" for name, value in own.items())
        shown += f", `training: {{clip_range: {spec.clip_range:g}}}`" if spec.clip_range else ""
        rows.append(f"| `{spec.name}` ({spec.label}) | {shown} |")
    return "\n".join(rows) + "\n"


def _value(value: Any) -> str:
    """Return a value as in YAML; of more than four step indices in a row, only the first and the last."""
    if isinstance(value, BaseModel):
        value = value.model_dump(exclude_defaults=True)
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name}: {_value(part)}" for name, part in value.items()) + "}"
    if isinstance(value, tuple):
        row = len(value) > 4 and value == tuple(range(value[0], value[-1] + 1))
        return f"[{value[0]} … {value[-1]}]" if row else "[" + ", ".join(map(str, value)) + "]"
    return "null" if value is None else str(value)


def _argparse_rows(parser: argparse.ArgumentParser) -> list[tuple[str, str, str]]:
    rows = []
    for each in parser._actions:
        if isinstance(each, argparse._HelpAction | argparse._SubParsersAction):
            continue
        value = (
            ""
            if each.nargs == 0
            else " " + (str(each.metavar) if each.metavar else each.dest.upper())
        )
        words = (
            ", ".join(each.option_strings) + value
            if each.option_strings
            else str(each.metavar or each.dest.upper())
        )
        required = each.required or not each.option_strings
        default = (
            "required"
            if required
            else ""
            if each.default in (None, False, [])
            else f"`{each.default}`"
        )
        rows.append(
            (f"`{words}`", default, re.sub(r" \(default: %\(default\)s\)", "", each.help or ""))
        )
    return rows


def _options_table(rows: list[tuple[str, str, str]]) -> str:
    if not rows:
        return "No options.\n"
    body = "".join(
        f"| {_cell(words)} | {_cell(default)} | {_cell(about)} |\n"
        for words, default, about in rows
    )
    return f"| option | default | description |\n|---|---|---|\n{body}"


def _parser(module: str, words: list[str]) -> argparse.ArgumentParser:
    """Return the parser that the module's `main` makes, which is stopped before anything runs."""
    found: list[argparse.ArgumentParser] = []

    class Stop(BaseException):
        pass

    def stop(self: argparse.ArgumentParser, *_: Any, **__: Any) -> None:
        found.append(self)
        raise Stop

    main: Callable[[], None] = importlib.import_module(module).main
    with (
        patch.object(argparse.ArgumentParser, "parse_args", stop),
        patch.object(sys, "argv", [module, *words]),
        patch(f"{module}.SIDE_BY_SIDE", 2, create=True),
    ):
        try:
            main()
        except Stop:
            pass
    return found[0]


def _text(words: str | None) -> str:
    """Return a docstring as paragraphs; what is indented becomes code, with its comments after #."""
    paragraphs = re.split(r"\n\s*\n", inspect.cleandoc(words or ""))
    return "\n\n".join(
        "```\n"
        + "\n".join(re.sub(r"  +", "  # ", line.strip()) for line in each.split("\n"))
        + "\n```"
        if each.startswith("    ")
        else " ".join(each.split())
        for each in paragraphs
    )


def _cell(words: str) -> str:
    return words.replace("|", "\\|")


def machines_of(profile: str) -> Machines | None:
    """Return the machines that the comment of a profile of published models names."""
    text = (FOLDER.parent.parent / "profiles" / f"{profile}.yaml").read_text()
    said = re.search(
        rf"rehearse --profile {profile} --gpus (\d+)(?: --nodes (\d+))? --memory ([\d.]+)`", text
    )
    return Machines(int(said[1]), float(said[3]), int(said[2] or 1)) if said else None


def calls_page() -> str:
    """Return the page of the calls' rows."""
    parts = [CALLS_HEAD]
    for path in sorted((FOLDER.parent.parent / "profiles").glob("*.yaml")):
        profile, machines = load_profile(path), machines_of(path.stem)
        if profile.models.source != "hub" or not machines:
            continue
        parts.append(
            f"## {path.stem}\n\nOn {machines.gpus} GPUs.\n\n"
            "| method | SDE steps | rollout | update | equal | tolerated |"
        )
        parts[-1] += "\n|---|---|---|---|---|---|"
        for name in profile.methods:
            calls = calls_of(profile, name, machines)
            if not calls:
                continue
            rows = lambda sets: ", ".join(map(str, sorted(set().union(*sets))))
            equal = all(one.rollout == one.update for one in calls)
            steps = f"{calls[0].step} … {calls[-1].step}" if len(calls) > 1 else str(calls[0].step)
            parts[-1] += (
                f"\n| {name} | {steps} | {rows(one.rollout for one in calls)} | "
                f"{rows(one.update for one in calls)} "
                f"| {'yes' if equal else 'no'} | {min(one.tolerated for one in calls):.2%} |"
            )
        parts[-1] += "\n"
    return "\n".join(parts)


def bases_page() -> str:
    """Return the page of base models: a table of repositories for each architecture."""
    folder, columns = (
        FOLDER.parent.parent / "profiles",
        ("repository", "all weights", "a LoRA", "generates", "guidance", "steps", "licence"),
    )
    profiles = {path.stem: load_profile(path) for path in sorted(folder.glob("*.yaml"))}
    twins = {
        BASES[each.models.base]: name
        for name, each in reversed(profiles.items())
        if name.startswith("tiny")
    }
    parts = [BASES_HEAD]
    for base in ARCHITECTURES.values():
        parts.append(
            f"## {base.label}\n\n"
            f"Exports: {', '.join(base.forms)}. Small version for a CPU: "
            f"profile `{twins[base.pipeline.__name__]}`.\n"
        )
        rows = [columns, ("---",) * len(columns)]
        for repo in base.published:
            own = {
                name: each
                for name, each in profiles.items()
                if each.models.source == "hub" and each.models.repos["pipeline"].repo == repo
            }
            shown = next(iter(own.values()), None)
            guidance, steps = (
                f"{shown.sampling.guidance:g}, " if shown else "",
                str(shown.evaluation.steps[0]) if shown else "",
            )
            made = [
                _smallest(
                    {name: each for name, each in own.items() if bool(each.training.lora) == lora}
                )
                for lora in (False, True)
            ]
            rows.append(
                (repo, *made, "yes", guidance + _guidance(base, repo), steps, _licence(base, repo))
            )
        for repo, instead in base.distilled.items():
            rows.append(
                (
                    repo,
                    f"no: distilled, train {instead}",
                    "no",
                    "yes",
                    "none",
                    "few",
                    _licence(base, instead),
                )
            )
        parts.append("\n".join(f"| {' | '.join(row)} |" for row in rows) + "\n")
    return "\n".join(parts)


def _smallest(profiles: dict[str, Profile]) -> str:
    """Return the profile for the machine with the least memory, and that machine."""
    machines = {name: machine for name in profiles if (machine := machines_of(name))}
    if not machines:
        return "yes, in a profile of your own"
    name = min(machines, key=lambda name: machines[name].gpus * machines[name].memory)
    return f"`{name}`: {machines[name].gpus} × {machines[name].memory:g} GiB"


def _guidance(architecture: Architecture, repo: str) -> str:
    least = next((least for least in (0, 1) if architecture.forward_evals(least + 0.5) > 1), None)
    if least is not None:
        return f"classifier-free above {least}"
    return (
        "an input of the model"
        if architecture.published[repo].transformer.get("guidance_embeds")
        else "none"
    )


def _licence(architecture: Architecture, repo: str) -> str:
    about = next(about for start, about in architecture.licences.items() if repo.startswith(start))
    return about.get("license_name", about["license"])


def rows_of(profile: Profile, entry: str) -> list[dict[str, Any]]:
    """Return the rows of tools/published.yaml for an entry of a profile of published weights."""
    repo = profile.models.repos["pipeline"].repo if profile.models.source == "hub" else ""
    found = [
        row
        for row in PUBLISHED["rows"]
        if entry in row["methods"] and repo.startswith(tuple(row["of"]))
    ]
    # Where somebody has published the method on this base, nothing is taken in its place
    return [row for row in found if row["source"]] or found


def resolved_settings(profile: Profile, entry: str) -> Callable[[str], Any]:
    """Return a function of a dotted name such as `objective.times`: that setting of a resolved entry, as a JSON value; None: it has none."""
    run = profile.run(entry)
    whole = {"sampling": run.sampling, "training": run.training, "evaluation": profile.evaluation}
    values = {
        **run.method.model_dump(mode="json"),
        **{name: each.model_dump(mode="json") for name, each in whole.items()},
    }
    return lambda name: reduce(lambda inner, key: (inner or {}).get(key), name.split("."), values)


def published_page() -> str:
    """Return the page of published settings: a table for each row of tools/published.yaml."""
    profiles = {
        path.stem: load_profile(path)
        for path in sorted((FOLDER.parent.parent / "profiles").glob("*.yaml"))
    }
    shown = lambda value: f"{value:g}" if isinstance(value, float) else str(value)
    parts = [PUBLISHED_HEAD]
    for row in PUBLISHED["rows"]:
        of = {
            (name, entry): resolved_settings(each, entry)
            for name, each in profiles.items()
            for entry in each.methods
            if any(one is row for one in rows_of(each, entry))
        }
        source = (
            row["source"]
            or f"no published settings on this base model known; used instead: {row['instead']}"
        )
        bases = " and ".join(repo.partition("/")[2] for repo in row["of"])
        heading = ", ".join(row["methods"]) if len(row["methods"]) < 4 else "the other methods"
        text = f"Methods {', '.join(f'`{method}`' for method in row['methods'])}: {source}."
        parts.append(
            f"## {bases}: {heading}\n\n"
            f"{textwrap.fill(text, 150, break_long_words=False, break_on_hyphens=False)}\n"
        )
        parts.append("| setting | published | here | why |\n|---|---|---|---|")
        for setting, published in row["published"].items():
            here = dict.fromkeys(shown(read(setting)) for read in of.values())
            reason = row["differs"].get(setting, "as published")
            parts[-1] += (
                f"\n| `{setting}` | {shown(published)} | {'; '.join(here)} | "
                f"{PUBLISHED['reasons'].get(reason, reason)} |"
            )
        parts[-1] += "\n"
    return "\n".join(parts)


def api_page() -> str:
    """Return the page of the Python API, which mkdocstrings fills from docstrings."""
    sections = (
        f"## {title}\n\n" + "\n\n".join(f"::: g2rpo_core.{name}" for name in names)
        for title, names in API.items()
    )
    return "\n".join([API_HEAD, "\n\n".join(sections)]) + "\n"


WRITTEN_PAGES = {"settings.md": settings_page}
BUILT_PAGES = {
    "commands.md": commands_page,
    "methods.md": methods_page,
    "published_settings.md": published_page,
    "bases.md": bases_page,
    "calls.md": calls_page,
    "api.md": api_page,
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "page",
        nargs="?",
        choices=[name.removesuffix(".md") for name in BUILT_PAGES],
        help="print this page instead",
    )
    chosen = parser.parse_args().page
    if chosen:
        print(BUILT_PAGES[f"{chosen}.md"](), end="")
        return
    for name, page in WRITTEN_PAGES.items():
        (FOLDER / name).write_text(page())
        print(FOLDER / name)


if __name__ == "__main__":
    main()
