"""Read tables and numbers whose values must be of a kind: the first that is not is named."""

import math
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any

from g2rpo_core.foundation.errors import UserError
from g2rpo_core.foundation.files import MANY, complaint, read_json, reading, shown, whole

if TYPE_CHECKING:
    import pandas as pd

# What a column of a table holds: a phrase for messages, and a test of one value
TEXT = ("a text", lambda value: isinstance(value, str))
COUNT = (
    "a whole number from 0",
    lambda value: isinstance(value, Real) and float(value).is_integer() and float(value) >= 0,
)
NUMBER = ("a number", lambda value: isinstance(value, Real) and math.isfinite(value))
Column = tuple[str, Callable[[Any], bool]]


def read_numbers(path: Path) -> dict[str, float]:
    """Return the data of a JSON file of names with numbers; UserError for any other value."""
    data = read_json(path, dict)
    for name, value in data.items():
        if isinstance(value, bool) or not NUMBER[1](value):
            raise UserError(complaint(path, f"{shown(name)} is {shown(value)}, not a number"))
    return data


def or_null(column: Column) -> Column:
    """Return the same of a column in which a value may be missing."""
    what, test = column
    return f"{what} or null", lambda value: _is_null(value) or test(value)


def read_table(path: Path, columns: Sequence[str] | Mapping[str, Column] = ()) -> "pd.DataFrame":
    """Return the table of a Parquet file, of these columns, which it must have, or of all.

    columns: their names, or also what each holds: UserError, naming the row, for another value.
    """
    import pandas as pd
    import pyarrow.parquet as pq

    whole(path)
    with reading(path):
        if path.open("rb").read(4) != b"PAR1":  # Arrow only looks at the end
            raise UserError(complaint(path, "is not a Parquet file, or its beginning is damaged"))
        there = pq.read_schema(path).names
    if lacking := [column for column in columns if column not in there]:
        raise UserError(
            complaint(path, f"has no column {lacking[0]!r}, only {', '.join(there[:MANY])}")
        )
    with reading(path):
        # Also that texts are UTF-8
        pq.read_table(path, columns=list(columns) or None).validate(full=True)
        table = pd.read_parquet(path, columns=list(columns) or None)
    check_values(path, table, columns if isinstance(columns, Mapping) else {})
    return table


def check_values(path: Path, table: "pd.DataFrame", columns: Mapping[str, Column]) -> None:
    """Check the values of a table that was read from a file; UserError with the first wrong row."""
    for name, (what, test) in columns.items():
        for row, value in enumerate(table[name].tolist(), 1):
            if not test(value):
                got = "null" if _is_null(value) else repr(value)[:60]
                raise UserError(complaint(path, f"row {row} has {got} as its {name}, not {what}"))


def _is_null(value: object) -> bool:
    """Tell whether a value is missing, as Python, NumPy or pandas has it."""
    return value is None or str(value) in ("<NA>", "nan", "NaT") and not isinstance(value, str)
