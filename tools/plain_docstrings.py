"""A griffe extension: docstrings are plain text with code between backticks, so what Markdown would take for markup is escaped."""

import re
from typing import Any

import griffe

CODE = re.compile(r"(`+[^`]*`+)")


class PlainDocstrings(griffe.Extension):
    """`leaves[branch][granularity]` is no link, and `<name>` is no tag."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring:
            obj.docstring.value = plain(obj.docstring.value)


def plain(text: str) -> str:
    parts = CODE.split(text)
    return "".join(part if number % 2 else re.sub(r"([\]\[<*])", r"\\\1", part) for number, part in enumerate(parts))
