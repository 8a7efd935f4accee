"""Writes docs/reference/settings.md and commands.md from the code: `python -m tools.reference`. A test holds them equal to it."""

import argparse
import importlib
import inspect
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin
from unittest.mock import patch

import annotated_types
import typer
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from g2rpo_core.algorithm.methods import SPECS, Method
from g2rpo_core.cli.main import app
from g2rpo_core.cli.of_the_checkout import COMMANDS
from g2rpo_core.config.load import MainRun, Study
from g2rpo_core.config.profile import MethodRun, Profile
from g2rpo_core.rewards.custom import CustomRewardSettings
from g2rpo_core.rewards.registry import REWARDS
from g2rpo_core.rewards.server_settings import RewardServerSettings

FOLDER = Path(__file__).resolve().parent.parent / "docs" / "reference"
WRITTEN = "<!-- Written by `python -m tools.reference`; do not edit. -->"
PLAIN = {int: "integer", float: "number", str: "text", bool: "true or false", object: "anything", type(None): "null"}
OF_THE_CHECKOUT = {  # what else is started from the checkout: the module with its `main`
    "python -m studies": "studies.__main__",
    "python -m flows.serve": "flows.serve",
}
ACTIONS = {"python -m studies": ("run", "new")}

SETTINGS_HEAD = f"""{WRITTEN}

# Settings

Every setting of a profile, section by section, and of `params.yaml`. Types, ranges and defaults are read from the code.
A setting without a default is required. A profile that `extends:` another one inherits what it leaves out.

- To change a setting: [Change a setting](../howto/settings.md).
- To see the values of a whole profile and where each comes from: `g2rpo profile show tiny`.
- Words: [glossary](../glossary.md).
"""

COMMANDS_HEAD = f"""{WRITTEN}

# Commands

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
    """The page of settings."""
    parts = [SETTINGS_HEAD]
    parts += _tables("params.yaml", MainRun, "What `dvc repro` runs.")
    parts += _tables("params.yaml of a study", Study, "What `python -m studies run` runs.", known=(MethodRun,))
    for name, field in Profile.model_fields.items():
        if name == "models":
            for option in get_args(field.annotation):
                source = get_args(option.model_fields["source"].annotation)[0]
                parts += _tables(f"models ({source})", option)
        elif name == "rewards":
            parts.append(
                "## rewards\n\nSettings of built-in rewards by name, and rewards of your own: see [Rewards](../rewards.md).\n"
            )
            for reward, spec in REWARDS.items():
                parts += _tables(f"rewards.{reward}", spec.settings, f"{spec.label}.", level=3, known=(RewardServerSettings,))
            parts += _tables("rewards, one of your own", CustomRewardSettings, level=3, known=(RewardServerSettings,))
            parts += _tables("rewards.NAME.server", RewardServerSettings, level=3)
        elif name == "methods":
            parts += _tables("methods.NAME", MethodRun)
            parts += _tables("methods.NAME.settings", Method, level=3)
            parts.append(_published_methods())
        elif name == "published":
            parts += _tables("published.NAME", next(_models(field.annotation)))
        else:
            parts += _tables(name, next(_models(field.annotation)))
    return "\n".join(parts)


def commands_page() -> str:
    """The page of commands."""
    parts = [COMMANDS_HEAD, "## g2rpo\n"]
    parts += _click_commands(typer.main.get_command(app), "g2rpo")
    for command, module in OF_THE_CHECKOUT.items():
        parser = _parser(module, [])
        parts.append(f"## {command}\n\n{_text(parser.description)}\n")
        if command not in ACTIONS:
            parts.append(_options_table(_argparse_rows(parser)))
        for action in ACTIONS.get(command, ()):
            sub = next(each for each in parser._actions if isinstance(each, argparse._SubParsersAction)).choices[action]
            parts.append(f"### {command} {action}\n\n{_options_table(_argparse_rows(sub))}")
    targets = re.findall(r"^([a-z-]+):.*## (.*)", (FOLDER.parent.parent / "Makefile").read_text(), re.MULTILINE)
    parts.append(
        "## make\n\n| target | what it does |\n|---|---|\n" + "".join(f"| `make {name}` | {about} |\n" for name, about in targets)
    )
    return "\n".join(parts)


def _tables(title: str, model: type[BaseModel], about: str | None = None, level: int = 2, known: tuple = ()) -> list[str]:
    """A heading, the class's own words, a table of its fields, and the same for each class that a field holds."""
    lines = [
        f"{'#' * level} {title}\n",
        (about or _text(model.__doc__)) + "\n",
        "| setting | type | default | description |",
        "|---|---|---|---|",
    ]
    if how := getattr(model, "how", None):
        lines.insert(2, f"A resumed run may change {', '.join(f'`{name}`' for name in sorted(how))}.\n")
    inner: list[tuple[str, type[BaseModel]]] = []
    for name, field in model.model_fields.items():
        key = field.alias or name
        kind = _type(field.annotation, list(field.metadata))
        lines.append(f"| `{key}` | {_cell(kind)} | {_cell(_default(field))} | {_cell(_about(model, name, field))} |")
        inner += [(key, each) for each in _models(field.annotation) if each not in known]
    out = ["\n".join(lines) + "\n"]
    for each in dict.fromkeys(each for _, each in inner):  # one table for all fields of one class
        keys = [key for key, its_class in inner if its_class is each]
        out += _tables(", ".join(f"{title}.{key}" if key == keys[0] else key for key in keys), each, level=min(level + 1, 4))
    return out


def _about(model: type[BaseModel], name: str, field: FieldInfo) -> str:
    """The field's description; else what the class's docstring says of it; else what the class of a section says of itself."""
    of_a_section = next((_text(each.__doc__).split("\n")[0] for each in _models(field.annotation)), "")
    return field.description or _from_docstring(model, name) or of_a_section


def _from_docstring(model: type[BaseModel], name: str) -> str:
    """What the docstring of the class, or of one above it, says as `name: ...;`."""
    for each in model.__mro__:
        found = re.search(rf"(?:^|[;.(]\s+|\n\s*)`?{name}`?: (.+?)(?:[;.](?:\s|$)|$)", each.__doc__ or "", re.DOTALL)
        if issubclass(each, BaseModel) and name in getattr(each, "model_fields", {}) and found:
            return " ".join(found[1].split())
    return ""


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    if isinstance(value, BaseModel):
        return "see below"
    if value is None:
        return "`null`"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, tuple):
        return "`[" + ", ".join(str(each) for each in value) + "]`"
    return f"`{value}`" if value is not PydanticUndefined else ""


def _type(annotation: Any, metadata: list[Any] | None = None) -> str:
    """A type in words, with its range."""
    limits = _range(metadata or [])
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _type(arguments[0], [*arguments[1:], *(metadata or [])])
    if origin is Literal:
        return "`" + "`, `".join(str(each) for each in arguments) + "`"
    if origin is Union or type(annotation).__name__ == "UnionType":
        return " or ".join(_type(each, metadata if each is not type(None) else None) for each in arguments)
    if origin is tuple:
        return f"list of {_type(arguments[0])}"
    if origin is dict:
        return f"mapping of {_type(arguments[0])} to {_type(arguments[1])}"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "section, see below"
    return PLAIN.get(annotation, getattr(annotation, "__name__", str(annotation))) + limits


def _range(metadata: list[Any]) -> str:
    words = []
    for each in [inner for item in metadata for inner in (item.metadata if isinstance(item, FieldInfo) else [item])]:
        if isinstance(each, annotated_types.Le) and each.le == 10**9:  # no limit that anybody meets
            continue
        for kind, sign in (
            (annotated_types.Gt, ">"),
            (annotated_types.Ge, "≥"),
            (annotated_types.Lt, "<"),
            (annotated_types.Le, "≤"),
        ):
            if isinstance(each, kind):
                value = getattr(each, kind.__name__.lower())
                words.append(f"{sign} {'2⁶⁴' if value == 2**64 else f'{value:g}' if isinstance(value, float) else f'{value:,}'}")
    return ", " + ", ".join(words) if words else ""


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    """The settings classes that an annotation holds, at any depth."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    else:
        for each in get_args(annotation):
            yield from _models(each)


def _published_methods() -> str:
    head = "### Published methods\n\nWhat each method sets, by name; all else has its default. `0 … 7` are step indices from the noisy end.\n\n"
    rows = ["| method | settings |", "|---|---|"]
    for spec in SPECS:
        own = {
            name: getattr(spec.settings, name)
            for name, field in Method.model_fields.items()
            if field.is_required() or getattr(spec.settings, name) != field.default
        }
        rows.append(
            f"| `{spec.name}` ({spec.label}) | " + ", ".join(f"`{name}: {_value(value)}`" for name, value in own.items()) + " |"
        )
    return head + "\n".join(rows) + "\n"


def _value(value: Any) -> str:
    """As in YAML; of many step indices in a row the first and the last."""
    if isinstance(value, BaseModel):
        return "{" + ", ".join(f"{name}: {_value(part)}" for name, part in value.model_dump(exclude_defaults=True).items()) + "}"
    if isinstance(value, tuple):
        row = len(value) > 4 and value == tuple(range(value[0], value[-1] + 1))
        return f"[{value[0]} … {value[-1]}]" if row else "[" + ", ".join(map(str, value)) + "]"
    return "null" if value is None else str(value)


def _click_commands(group: Any, name: str) -> Iterator[str]:
    for each, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from _click_commands(command, f"{name} {each}")
        elif each in COMMANDS:
            module, about, example = COMMANDS[each]
            yield f"### {name} {each}\n\n{about}\n\n```\n{name} {each} {example}\n```\n\n{_options_table(_argparse_rows(_parser(module, [])))}"
        else:
            about, *examples = (command.help or "").split("Example:")
            lines = "\n".join(" ".join(example.split()) for example in examples)
            fence = f"\n\n```\n{lines}\n```" if examples else ""
            yield f"### {name} {each}\n\n{_text(about)}{fence}\n\n{_options_table(list(_click_rows(command)))}"


def _click_rows(command: Any) -> Iterator[tuple[str, str, str]]:
    for each in command.params:
        if each.name in ("help", "install_completion", "show_completion"):
            continue
        argument = each.param_type_name == "argument"
        words = each.name.upper() if argument else ", ".join(each.opts)
        kind = "" if argument or getattr(each, "is_flag", False) else " " + _value_of(each)
        default = "required" if each.required else "" if each.default in (None, False, (), []) else f"`{each.default}`"
        yield f"`{words}{kind}`", default, getattr(each, "help", None) or ""


def _value_of(option: Any) -> str:
    """What an option of the command line takes, in capitals or as its choices."""
    annotation = option.type_descriptor.annotation
    if get_origin(annotation) is Literal:
        return "|".join(get_args(annotation))
    kind = next((each for each in get_args(annotation) if isinstance(each, type) and each is not type(None)), annotation)
    return option.metavar or {str: "TEXT", Path: "PATH", int: "INTEGER", float: "NUMBER"}.get(
        kind, getattr(kind, "__name__", "VALUE").upper()
    )


def _argparse_rows(parser: argparse.ArgumentParser) -> list[tuple[str, str, str]]:
    rows = []
    for each in parser._actions:
        if isinstance(each, argparse._HelpAction | argparse._SubParsersAction):
            continue
        value = "" if each.nargs == 0 else " " + (str(each.metavar) if each.metavar else each.dest.upper())
        words = ", ".join(each.option_strings) + value if each.option_strings else str(each.metavar or each.dest.upper())
        required = each.required or not each.option_strings
        default = "required" if required else "" if each.default in (None, False, []) else f"`{each.default}`"
        rows.append((f"`{words}`", default, re.sub(r" \(default: %\(default\)s\)", "", each.help or "")))
    return rows


def _options_table(rows: list[tuple[str, str, str]]) -> str:
    if not rows:
        return "No options.\n"
    body = "".join(f"| {_cell(words)} | {_cell(default)} | {_cell(about)} |\n" for words, default, about in rows)
    return f"| option | default | description |\n|---|---|---|\n{body}"


def _parser(module: str, words: list[str]) -> argparse.ArgumentParser:
    """The parser that the module's `main` makes, which is stopped before anything runs."""
    found: list[argparse.ArgumentParser] = []

    class Stop(BaseException):
        pass

    def stop(self: argparse.ArgumentParser, *_: Any, **__: Any) -> None:
        found.append(self)
        raise Stop

    main: Callable[[], None] = importlib.import_module(module).main
    with patch.object(argparse.ArgumentParser, "parse_args", stop), patch.object(sys, "argv", [module, *words]), \
            patch(f"{module}.CPUS", 2, create=True):  # fmt: skip
        try:
            main()
        except Stop:
            pass
    return found[0]


def _text(words: str | None) -> str:
    """A docstring as paragraphs; what is indented becomes code, with its comments after #."""
    paragraphs = re.split(r"\n\s*\n", inspect.cleandoc(words or ""))
    return "\n\n".join(
        "```\n" + "\n".join(re.sub(r"  +", "  # ", line.strip()) for line in each.split("\n")) + "\n```"
        if each.startswith("    ")
        else " ".join(each.split())
        for each in paragraphs
    )


def _cell(words: str) -> str:
    return words.replace("|", "\\|")


PAGES = {"settings.md": settings_page, "commands.md": commands_page}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=FOLDER)
    folder = parser.parse_args().out
    for name, page in PAGES.items():
        (folder / name).write_text(page())
        print(folder / name)


if __name__ == "__main__":
    main()
