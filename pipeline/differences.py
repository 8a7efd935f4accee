"""Measures how far a file is from another version of it, and says so in one line: a table from suffixes to functions.

All of them read both files whole, and raise a UserError on a damaged one.
"""

import json
import math
import os
from collections.abc import Callable, Mapping
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import torch
from PIL import Image
from safetensors.torch import load_file

from g2rpo_core.foundation.files import read_json, read_table, read_text, reading, whole
from g2rpo_core.foundation.texts import FEW, leaves, some, visible

SHORT = 32  # characters of a text that a line shows
SHARED = 8  # of them, that both texts have
MOST_WORDS = 200_000  # that are compared one by one; difflib takes minutes for more


def difference(old: Path, new: Path, name: str) -> str:
    """Return in one line how far `new` is from `old`; name: of the file, with the suffix that both contents have.

    UserError if one of them is damaged.
    """
    return visible(MEASURES.get(Path(name).suffix.lower(), bytes_apart)(old, new))


def images_apart(old: Path, new: Path) -> str:
    before, after = pixels(old), pixels(new)
    if before.shape != after.shape:
        return f"image: another size, {_size(before)} -> {_size(after)} pixels"
    apart = np.abs(after - before)
    if not apart.any():
        return "image: the same pixels, stored otherwise"
    return (
        f"image: values differ by {apart.max():.0f} of 255 at most, {apart.mean():.2g} on average"
    )


def pixels(path: Path) -> np.ndarray:
    """Return an image as numbers [height, width, 3] from 0 to 255."""
    with reading(whole(path)), Image.open(path) as image:
        return np.asarray(image.convert("RGB"), float)


def _size(image: np.ndarray) -> str:
    return f"{image.shape[1]}×{image.shape[0]}"


def safetensors_apart(old: Path, new: Path) -> str:
    return weights_apart(*(_safetensors(path) for path in (old, new)))


def _safetensors(path: Path) -> dict[str, torch.Tensor]:
    with reading(whole(path)):
        return load_file(path)


def checkpoints_apart(old: Path, new: Path) -> str:
    return weights_apart(*(_checkpoint(path) for path in (old, new)))


def _checkpoint(path: Path) -> dict[str, torch.Tensor]:
    """Return all tensors of a file that torch wrote, however deep they are in it."""
    with reading(whole(path)):
        loaded = torch.load(path, map_location="cpu", weights_only=True)
    return {key: value for key, value in leaves(loaded) if isinstance(value, torch.Tensor)}


def weights_apart(before: Mapping[str, torch.Tensor], after: Mapping[str, torch.Tensor]) -> str:
    """Tell the relative distance |a-b|/|a| over all weights that both have, and that of the tensor where it is largest."""
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
    """Name the columns that differ, those whose means moved most first; of a table of scores, each reward is a column."""
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
    """Return the columns of a table; in place of the column `score`, that of each `reward`, and numbers for bytes of tensors."""
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
    """Return how many standard errors the mean of a column moved, and a phrase; None if the columns are equal."""
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
    numbers.sort(
        key=lambda key: -abs(after[key] - before[key]) / max(abs(before[key]), abs(after[key]))
    )
    others = [key for key in shared if key not in numbers]
    said = []
    if numbers:
        said.append(
            f"{len(numbers)} of {sum(map(_is_number, before.values()))} numbers differ, most: "
            f"{_changes(numbers, before, after)}"
        )
    if others:
        said.append(
            f"other values: {_changes(others, before, after)}{f' and {len(others) - FEW} others' if len(others) > FEW else ''}"
        )
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
    """Return a value or word for a message: numbers with four digits, texts up to SHORT characters."""
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    return text if len(text) <= SHORT else f"{text[:SHORT]}…"


def texts_apart(old: Path, new: Path) -> str:
    """Count the words that changed, and show the first few."""
    before, after = (read_text(path).split() for path in (old, new))
    if before == after:
        return "text: the same words, spaced otherwise"
    if max(len(before), len(after)) > MOST_WORDS:
        return f"text: {len(before):,} -> {len(after):,} words, too many to compare"
    changed = [
        step for step in SequenceMatcher(None, before, after).get_opcodes() if step[0] != "equal"
    ]
    count = sum(max(end - start, last - first) for _, start, end, first, last in changed)
    shown = (
        _replaced(" ".join(before[start:end]), " ".join(after[first:last]))
        for _, start, end, first, last in changed[:FEW]
    )
    return (
        f"text: {count:,} of {len(before):,} words changed: "
        f"{', '.join(shown)}{', …' if len(changed) > FEW else ''}"
    )


def _replaced(old: str, new: str) -> str:
    """Show two texts from a few characters before they part."""
    parted = len(os.path.commonprefix([old, new]))
    start = parted - SHARED if parted > 2 * SHARED else 0
    one, other = (
        f"'{'…' if start else ''}{_short(text[start:])}'" if text else "nothing"
        for text in (old, new)
    )
    return f"{one} -> {other}"


def bytes_apart(old: Path, new: Path) -> str:
    """Tell of a file of any other kind how many bytes it has."""
    return f"file: {old.stat().st_size:,} -> {new.stat().st_size:,} bytes"


MEASURES: dict[str, Callable[[Path, Path], str]] = {
    **dict.fromkeys((".png", ".jpg", ".jpeg", ".webp"), images_apart),
    ".safetensors": safetensors_apart,
    **dict.fromkeys((".pt", ".pth", ".bin"), checkpoints_apart),
    ".parquet": tables_apart,
    ".json": json_apart,
    **dict.fromkeys(
        (".md", ".html", ".svg", ".yaml", ".yml", ".txt", ".jinja", ".js"), texts_apart
    ),
}
