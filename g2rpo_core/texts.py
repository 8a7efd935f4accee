"""Texts from outside (prompts, file names, servers' answers), so that they can be shown: no character of them steers a terminal or a page."""

import re
import unicodedata

BIDI = {"LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI"}  # Unicode's classes of what turns the direction of a line
MARKDOWN = re.compile(r"([\\`*_{}\[\]<>|~$])")


def steering(text: str) -> str | None:
    """The first character that steers what shows it: a control character but for line break and tab, one that turns the direction of
    what follows, a line or paragraph separator, half of a surrogate pair; None if there is none."""
    return next((char for char in text if _steers(char)), None)


def _steers(char: str) -> bool:
    kind = unicodedata.category(char)
    return (kind == "Cc" and char not in "\n\t") or kind in ("Cs", "Zl", "Zp") or unicodedata.bidirectional(char) in BIDI


def unprintable(text: str) -> str | None:
    """The first control character or half of a surrogate pair, which no text encoder and no file takes for text; None if there is none."""
    return next((char for char in text if unicodedata.category(char) in ("Cc", "Cs")), None)


def visible(text: object) -> str:
    """`text` in one line for a terminal: what steers it as its code, as \\x1b or \\u202e."""
    return "".join(ascii(char)[1:-1] if _steers(char) or char in "\n\t" else char for char in str(text))


def unsteered(text: str) -> str:
    """`text` with its lines, what steers a page as its code."""
    return "".join(ascii(char)[1:-1] if _steers(char) else char for char in text)


def markdown(text: object) -> str:
    """`text` as Markdown shows it literally, in one line, in a cell of a table too."""
    return MARKDOWN.sub(r"\\\1", visible(str(text).replace("\n", " ").replace("\t", " ")))
