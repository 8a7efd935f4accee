"""The commands and snippets of the documents, and the true parser of each program."""

import argparse
import importlib
import re
import shlex
import sys
from typing import NamedTuple
from unittest.mock import patch

import typer

from tests.conftest import ROOT

DOCUMENTS = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "benchmarks" / "README.md",
    ROOT / "studies" / "README.md",
    *sorted((ROOT / "studies").glob("*/README.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
PROGRAMS = ("g2rpo", "python", "dvc", "make")
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.DOTALL | re.MULTILINE)
INLINE = re.compile(r"`((?:[^`\n]|\n(?!\n))+)`")


class Snippet(NamedTuple):
    """What stands between fences: the document's name, the language, and the text."""

    document: str
    language: str
    text: str


def snippets() -> list[Snippet]:
    return [
        Snippet(path.name, *found)
        for path in DOCUMENTS
        for found in FENCE.findall(path.read_text())
    ]


def commands() -> dict[str, str]:
    """Every command of the documents, without comments and variables -> its first document."""
    found: dict[str, str] = {}
    for path in DOCUMENTS:
        text = path.read_text()
        lines = [
            line
            for language, block in FENCE.findall(text)
            if language == ""
            for line in block.splitlines()
        ]
        lines += [" ".join(inline.split()) for inline in INLINE.findall(FENCE.sub("", text))]
        for line in lines:
            for command in line.split(" # ")[0].split("  #")[0].split(" && "):
                words = (
                    re.sub(r"^(\s*[A-Z_0-9]+=\S+\s+)+", "", command)
                    .strip()
                    .removeprefix(".venv/bin/")
                )
                program, _, rest = words.partition(" ")
                if (
                    program in PROGRAMS
                    and rest
                    and "<<" not in rest
                    and not rest.startswith(("is ", "=="))
                ):
                    found.setdefault(words, path.name)
    return found


class Parsed(BaseException):
    """A program has parsed its words, and is stopped there."""


def check(command: str) -> None:
    """Raise AssertionError or the parser's own complaint if the program refuses these words."""
    program, *words = shlex.split(command)
    if program == "make":
        makefile = (ROOT / "Makefile").read_text()
        known = set(re.findall(r"^([a-z-]+):|^([A-Z]+) \?=|\$\(([A-Z]+)\)", makefile, re.MULTILINE))
        named = {word.split("=")[0] for word in words}
        assert named <= {name for each in known for name in each}, (
            f"make has no target and no variable of {named}"
        )
    elif program == "g2rpo":
        from g2rpo_core.cli.checkout import COMMANDS
        from g2rpo_core.cli.commands import app

        if words[0] in COMMANDS and words[1:]:
            by_argparse(COMMANDS[words[0]][0], words[1:])
        else:
            by_click(typer.main.get_command(app), "g2rpo", words)
    elif program == "dvc":
        from dvc.cli.parser import get_main_parser

        get_main_parser().parse_args(words)
    elif program == "python":
        assert words[0] == "-m", command
        by_argparse(words[1], words[2:])


def by_click(command, name: str, words: list[str], parent=None) -> None:
    """Down the groups to the command, whose options and arguments are parsed; nothing of it runs.

    A command that is only named, without all that it needs, is left at that.
    """
    try:
        context = command.make_context(name, list(words), parent=parent)
    except Exception as error:
        if type(error).__name__ in (
            "MissingParameter",
            "Exit",
        ):  # only named; or --help. Typer has a click of its own
            return
        raise
    rest = [*getattr(context, "_protected_args", []), *context.args]
    if hasattr(command, "resolve_command") and rest:
        with context:
            sub_name, sub, more = command.resolve_command(context, rest)
        by_click(sub, sub_name, list(more), context)


def by_argparse(module: str, words: list[str]) -> None:
    """The module's own `main`, stopped when its parser has taken the words."""
    parse = argparse.ArgumentParser.parse_args

    def stop(self, *arguments, **named):
        parse(self, *arguments, **named)
        raise Parsed

    try:
        run = importlib.import_module(f"{module}.__main__" if module == "studies" else module).main
    except AttributeError:
        raise AssertionError(f"python -m {module}: has no main") from None
    with (
        patch.object(argparse.ArgumentParser, "parse_args", stop),
        patch.object(sys, "argv", [module, *words]),
    ):
        try:
            run()
        except Parsed:
            return
        except SystemExit as ended:
            raise AssertionError(
                f"python -m {module} {' '.join(words)}: exit status {ended.code}"
            ) from None
    assert not words, f"python -m {module} takes no words"
