"""Measure how far the numbers of a file are from those of another version of it, in one line.

Tables, JSON and safetensors have numbers to compare; of other files the sizes are told.

Experimental: main works without it.
"""

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import torch
from safetensors.torch import load_file

from g2rpo_core.foundation.files import read_json, reading, whole
from g2rpo_core.foundation.tables import read_table
from g2rpo_core.foundation.texts import FEW, leaves, some, visible

SHORT = 32  # characters of a text that a line shows


def difference(old: Path, new: Path, name: str) -> str:
    """Return in one line how far `new` is from `old`; name: with the suffix of both contents.

    UserError if one of them is damaged.
    """
    return visible(MEASURES.get(Path(name).suffix.lower(), bytes_apart)(old, new))


def safetensors_apart(old: Path, new: Path) -> str:
    return weights_apart(*(_safetensors(path) for path in (old, new)))


def _safetensors(path: Path) -> dict[str, torch.Tensor]:
    with reading(whole(path)):
        return load_file(path)


def weights_apart(before: Mapping[str, torch.Tensor], after: Mapping[str, torch.Tensor]) -> str:
    """Tell the relative distance |a-b|/|a| over all shared weights, and the largest of a tensor."""
    shared = [name for name in before if name in after and before[name].shape == after[name].shape]
    squares = {
        name: (_norm(after[name].double() - before[name].double()), _norm(before[name].double()))
        for name in shared
    }
    far = math.hypot(*(apart for apart, _ in squares.values()))
    size = math.hypot(*(norm for _, norm in squares.values()))
    parts = [f"weights: relative distance {_ratio(far, size):.2g} over {len(shared)} tensors"]
    if far:
        worst = max(squares, key=lambda name: _ratio(*squares[name]))
        parts.append(f"at most {_ratio(*squares[worst]):.2g}, in {worst}")
    if other := len(before.keys() | after.keys()) - len(shared):
        parts.append(f"{other} tensors only in one of them, or of another shape")
    return "; ".join(parts)


def _norm(tensor: torch.Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor))


def _ratio(apart: float, size: float) -> float:
    return apart / size if size else math.inf if apart else 0.0


def tables_apart(old: Path, new: Path) -> str:
    """Name the columns that differ, those whose means moved most first.

    In a table of scores each reward is a column.
    """
    before, after = columns(old), columns(new)
    said = []
    if lacking := [name for name in before if name not in after]:
        said.append(f"lacks {some(lacking)}")
    if added := [name for name in after if name not in before]:
        said.append(f"new: {some(added)}")
    apart = [column_apart(name, before[name], after[name]) for name in before if name in after]
    found = sorted((one for one in apart if one), key=lambda one: -one[0])
    said += [text for _, text in found[:FEW]]
    if len(found) > FEW:
        said.append(f"and {len(found) - FEW} other columns")
    return f"table: {'; '.join(said) or 'the same values, stored otherwise'}"


def columns(path: Path) -> dict[str, pd.Series]:
    """Return a table's columns, with one for each reward's scores, and tensors as numbers."""
    table = read_table(path)
    series = {name: table[name] for name in table}
    about = json.loads((pq.read_schema(path).metadata or {}).get(b"g2rpo", b"{}"))
    dtype = getattr(torch, str(about.get("dtype")), None)
    for name, column in series.items():
        if dtype and len(column) and all(isinstance(value, bytes) for value in column):
            whole_column = torch.frombuffer(bytearray(b"".join(column)), dtype=dtype)
            series[name] = pd.Series(whole_column.float().numpy())
    if {"reward", "score"} <= series.keys():
        scores = series.pop("score")
        for reward, part in scores.groupby(table.reward, sort=False):
            series[f"score of {reward}"] = part.reset_index(drop=True)
    return series


def column_apart(name: str, before: pd.Series, after: pd.Series) -> tuple[float, str] | None:
    """Return by how many standard errors a mean moved, and a phrase; None for equal columns."""
    if len(before) != len(after):
        return math.inf, f"{name}: {len(before)} -> {len(after)} values"
    if before.equals(after):
        return None
    if not all(pd.api.types.is_numeric_dtype(column) for column in (before, after)):
        return 0.0, f"{name}: {sum(map(_unlike, before, after))} of {len(before)} values differ"
    first, second = (column.to_numpy(float) for column in (before, after))
    gaps = np.isnan(first) != np.isnan(second)
    apart = np.abs(second - first)[~np.isnan(second - first)]
    text = f"{name}: {(apart > 0).sum() + gaps.sum()} of {len(first)} values differ"
    if not apart.any():
        return 0.0, text
    error = pd.Series(first).sem()
    moved = abs(np.nanmean(second) - np.nanmean(first)) / error if error else 0.0
    said = f"{text}, by {apart.max():.2g} at most and {apart.mean():.2g} on average"
    return float(
        moved
    ), f"{said}; the mean moves by {moved:.2g} of its standard errors" if error else said


def _unlike(one: object, other: object) -> bool:
    return not np.array_equal(np.asarray(one), np.asarray(other))


def json_apart(old: Path, new: Path) -> str:
    """Name the numbers that differ most, relative to their size, and then other values."""
    before: dict[str, Any] = dict(leaves(read_json(old)))
    after: dict[str, Any] = dict(leaves(read_json(new)))
    shared = [key for key in before if key in after and before[key] != after[key]]
    numbers = [key for key in shared if _is_number(before[key]) and _is_number(after[key])]
    moved = lambda old, new: abs(new - old) / max(abs(old), abs(new))
    numbers.sort(key=lambda key: -moved(before[key], after[key]))
    others = [key for key in shared if key not in numbers]
    said = []
    if numbers:
        most, count = _changes(numbers, before, after), sum(map(_is_number, before.values()))
        said.append(f"{len(numbers)} of {count} numbers differ, most: {most}")
    if others:
        more = f" and {len(others) - FEW} others" if len(others) > FEW else ""
        said.append(f"other values: {_changes(others, before, after)}{more}")
    if lacking := [key for key in before if key not in after]:
        said.append(f"lacks {some(lacking)}")
    if added := [key for key in after if key not in before]:
        said.append(f"new: {some(added)}")
    return f"JSON: {'; '.join(said) or 'the same values, written otherwise'}"


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _changes(keys: list[str], before: Mapping, after: Mapping) -> str:
    return ", ".join(f"{key}: {_short(before[key])} -> {_short(after[key])}" for key in keys[:FEW])


def _short(value: object) -> str:
    """Return a value for a message: numbers with four digits, texts up to SHORT characters."""
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    return text if len(text) <= SHORT else f"{text[:SHORT]}…"


def bytes_apart(old: Path, new: Path) -> str:
    """Tell how many bytes both have, of a file of any other kind."""
    return f"differs ({old.stat().st_size:,} -> {new.stat().st_size:,} bytes)"


MEASURES: dict[str, Callable[[Path, Path], str]] = {
    ".safetensors": safetensors_apart,
    ".parquet": tables_apart,
    ".json": json_apart,
}
