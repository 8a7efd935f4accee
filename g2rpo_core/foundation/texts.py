"""Makes texts from outside (prompts, file names, servers' answers) safe to show: none of them controls a terminal or a page."""

import io
import re
import sys
import unicodedata

# Unicode's classes of characters that change the direction of a line
BIDI = {"LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI"}
MARKDOWN = re.compile(r"([\\`*_{}\[\]<>|~$])")


def steering(text: str) -> str | None:
    """Return the first character that controls how text is shown; None if there is none.

    That is a control character other than line break and tab, one that changes the direction of what follows, a line or paragraph
    separator, or half of a surrogate pair.
    """
    return next((char for char in text if _steers(char)), None)


def _steers(char: str) -> bool:
    kind = unicodedata.category(char)
    return (kind == "Cc" and char not in "\n\t") or kind in ("Cs", "Zl", "Zp") or unicodedata.bidirectional(char) in BIDI


def unprintable(text: str) -> str | None:
    """Return the first control character or half of a surrogate pair, which text encoders and files do not accept.

    None if there is none.
    """
    return next((char for char in text if unicodedata.category(char) in ("Cc", "Cs")), None)


def visible(text: object) -> str:
    """Return `text` in one line for a terminal, with controlling characters as their code (that of escape is x1b after a backslash)."""
    return "".join(ascii(char)[1:-1] if _steers(char) or char in "\n\t" else char for char in str(text))


def show_any_text() -> None:
    """Let this process print characters that the terminal's encoding lacks, as their codes."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def unsteered(text: str) -> str:
    """Return `text` with its line breaks, and controlling characters as their code."""
    return "".join(ascii(char)[1:-1] if _steers(char) else char for char in text)


def markdown(text: object) -> str:
    """Return `text` as Markdown shows it literally, in one line, in a cell of a table too."""
    return MARKDOWN.sub(r"\\\1", visible(str(text).replace("\n", " ").replace("\t", " ")))
