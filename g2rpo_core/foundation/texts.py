"""Makes texts from outside (prompts, file names, answers) safe to show on terminals and pages.

And shortens what would not fit into a line.
"""

import io
import re
import sys
import traceback
import unicodedata
from collections.abc import Sequence
from typing import TextIO

# Unicode's classes of characters that change the direction of a line
BIDI = {"LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI"}
FEW = 3  # names, numbers or words that a line shows
MARKDOWN = re.compile(r"([\\`*_{}\[\]<>|~$])")


# How a line begins that says why a program failed
REASON = re.compile(r"(?:ERROR|error|fatal):?\s+|(?=OSError)")


def reason(output: str) -> str:
    """Return in one line why a program failed, by what it wrote.

    That is its last line that begins with ERROR or error, without this word, else the last one that
    is neither blank nor DVC's advertisement.
    """
    lines = [
        line
        for line in map(str.strip, ("it wrote nothing\n" + output).splitlines())
        if line and not line.startswith("Having any troubles?")
    ]
    last = next(filter(REASON.match, reversed(lines)), lines[-1])
    return visible(REASON.sub("", last, count=1))[:300]


def steering(text: str) -> str | None:
    """Return the first character that controls how text is shown; None if there is none.

    That is a control character other than line break and tab, one that changes the direction of
    what follows, a line or paragraph separator, or half of a surrogate pair.
    """
    return next((char for char in text if _steers(char)), None)


def _steers(char: str) -> bool:
    kind = unicodedata.category(char)
    return (
        (kind == "Cc" and char not in "\n\t")
        or kind in ("Cs", "Zl", "Zp")
        or unicodedata.bidirectional(char) in BIDI
    )


def unprintable(text: str) -> str | None:
    """Return the first control character or half of a surrogate pair; None if there is none.

    Text encoders and files do not accept them.
    """
    return next((char for char in text if unicodedata.category(char) in ("Cc", "Cs")), None)


def normalized(text: str) -> str:
    """Return a prompt's text as it is encoded: Unicode's NFC, single spaces, none at its ends."""
    return " ".join(unicodedata.normalize("NFC", text).split())


# Unicode's property Default_Ignorable_Code_Point, and the blank of Braille: zero-width characters,
# soft hyphens, marks of direction, byte order marks, fillers, variation selectors, tags
IGNORABLE = re.compile(
    "[\u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f\u202a-\u202e"
    "\u2060-\u206f\u2800\u3164\ufe00-\ufe0f\ufeff"
    "\uffa0\ufff0-\ufff8\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0000-\U000e0fff]"
)


def comparable(text: str) -> str:
    """Return a text as texts are compared: two that look alike are equal.

    Unicode's NFKC with case folded, as UAX #31 has it, without what is not seen, with single spaces
    and none at its ends.
    """
    folded = unicodedata.normalize("NFKC", IGNORABLE.sub("", text)).casefold()
    return " ".join(IGNORABLE.sub("", unicodedata.normalize("NFKC", folded)).split())


def unseen(text: str) -> bool:
    """Say whether no character of a text is seen: only spaces, controls and ignorable ones."""
    return not any(
        unicodedata.category(char) not in ("Cc", "Zs", "Zl", "Zp")
        for char in IGNORABLE.sub("", text)
    )


def natural(name: str) -> tuple[list[str | int], str]:
    """Return the key that sorts names as people count: 2.png before 10.png; 1 and 01 by name."""
    return [
        int(part) if place % 2 else part for place, part in enumerate(re.split("([0-9]+)", name))
    ], name


def visible(text: object) -> str:
    """Return `text` in one line for a terminal, with controlling characters as their code."""
    return "".join(
        ascii(char)[1:-1] if _steers(char) or char in "\n\t" else char for char in str(text)
    )


def echo(*lines: object, file: TextIO | None = None) -> None:
    """Print lines on stdout or `file`, each of them `visible`: the one way to print.

    Whatever a name, a prompt, a reason or a message holds, it controls no terminal and begins no
    line of its own.
    """
    for line in lines or ("",):
        print(visible(line), file=file or sys.stdout, flush=True)


def show_any_text() -> None:
    """Let this process print any text: characters that the terminal lacks or that control it.

    They are shown as their codes, also in tracebacks of errors that nobody foresaw.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    sys.excepthook = lambda kind, error, trace: echo(
        *"".join(traceback.format_exception(kind, error, trace)).splitlines(), file=sys.stderr
    )


def unsteered(text: str) -> str:
    """Return `text` with its line breaks, and controlling characters as their code."""
    return "".join(ascii(char)[1:-1] if _steers(char) else char for char in text)


def markdown(text: object) -> str:
    """Return `text` as Markdown shows it literally, in one line, in a cell of a table too."""
    return MARKDOWN.sub(r"\\\1", visible(str(text).replace("\n", " ").replace("\t", " ")))


def some(names: Sequence[str]) -> str:
    """Name the first few, and give the number of the others."""
    return ", ".join(names[:FEW]) + (f" and {len(names) - FEW} others" if len(names) > FEW else "")
