"""The commands and snippets of the documents, and the true parser of each program."""

import argparse
import importlib
import re
import shlex
import sys
from typing import NamedTuple
from unittest.mock import patch

from typer.testing import CliRunner

from tests.conftest import ROOT

DOCUMENTS = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "benchmarks" / "README.md",
    ROOT / "studies" / "README.md",
    *sorted((ROOT / "studies").glob("*/README.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
COMMAND = re.compile(r"(g2rpo|python|dvc|make) (?!is |==)[^<]+$")
VARIABLES = re.compile(r"^([A-Z_0-9]+=\S+\s+)+")
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
        lines = [" ".join(inline.split()) for inline in INLINE.findall(FENCE.sub("", text))]
        for language, block in FENCE.findall(text):
            lines += [] if language else block.splitlines()
        for line in lines:
            for command in re.split(r" && ", re.split(r" +# ", line)[0]):
                words = VARIABLES.sub("", command.strip()).removeprefix(".venv/bin/")
                if COMMAND.match(words):
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

        if words[0] in COMMANDS:
            if words[1:]:
                by_argparse(COMMANDS[words[0]][0], words[1:])
        else:
            # Options are parsed before the help is shown; what it needs may be missing
            done = CliRunner().invoke(app, [*words, "--help"])
            assert done.exit_code == 0, done.output
    elif program == "dvc":
        from dvc.cli.parser import get_main_parser

        get_main_parser().parse_args(words)
    elif program == "python":
        assert words[0] == "-m", command
        by_argparse(words[1], words[2:])


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
