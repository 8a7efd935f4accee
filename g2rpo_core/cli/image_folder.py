"""Scores a folder of images and their prompts with rewards."""

from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

import pandas as pd
from PIL import Image
from tqdm import tqdm

from g2rpo_core.errors import UserError
from g2rpo_core.files import reading, whole
from g2rpo_core.rewards.spec import Reward, RewardWithReasons

SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".tif", ".tiff", ".gif")
BATCH = 64  # images open at a time


def pair(folder: Path, prompts: Path) -> pd.DataFrame:
    """One row per image with `file` (its name in the folder) and `prompt`.

    UserError if folder and prompts do not fit together.
    """
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder")
    files = sorted(path.name for path in folder.iterdir() if path.suffix.lower() in SUFFIXES)
    if not files:
        raise UserError(f"{folder}: holds no image ({', '.join(SUFFIXES)})")
    try:
        if prompts.suffix == ".csv":
            table = pd.read_csv(prompts, dtype=str, keep_default_na=False)
        else:
            table = pd.DataFrame({"prompt": prompts.read_text(encoding="utf-8").splitlines()})
    except FileNotFoundError:
        raise UserError(f"{prompts}: no such file") from None
    except OSError as error:
        raise UserError(f"{prompts}: cannot be read: {error.strerror}") from None
    except ValueError as error:  # not UTF-8, not a csv, or empty
        raise UserError(f"{prompts}: cannot be read: {' '.join(str(error).split())}") from None
    if prompts.suffix == ".csv":
        if not {"file", "prompt"} <= set(table.columns):
            raise UserError(f"{prompts}: needs columns file,prompt; has {','.join(table.columns)}")
        unknown = sorted(set(table.file) - set(files))
        if unknown:
            raise UserError(f"{prompts}: {unknown[0]} is not an image in {folder}")
        table = table[["file", "prompt"]]
    else:
        if len(table) != len(files):
            raise UserError(f"{prompts}: {len(table)} lines for the {len(files)} images in {folder}; need one line per image")
        table.insert(0, "file", files)
    if (table.prompt.str.strip() == "").any():
        raise UserError(f"{prompts}: the prompt of {table.file[table.prompt.str.strip() == ''].iloc[0]} is empty")
    return table


def read_image(path: Path) -> Image.Image:
    """Reads a whole image file; UserError if it is not an image, is damaged, or exceeds Pillow's limit."""
    whole(path)
    with reading(path), Image.open(path) as image:
        image.load()
        return image


def score(folder: Path, table: pd.DataFrame, scorers: Mapping[str, Reward]) -> dict[str, list]:
    """New columns for the table: the scores of each reward, and the reasons for missing ones."""
    scores: dict[str, list] = defaultdict(list)
    for start in tqdm(range(0, len(table), BATCH), desc="score", unit_scale=BATCH, unit="image"):
        part = table.iloc[start : start + BATCH]
        images = [read_image(folder / file) for file in part.file]
        for name, scorer in scorers.items():
            if isinstance(scorer, RewardWithReasons):
                values, reasons = scorer.score_with_reasons(images, list(part.prompt))
                scores[name] += values.tolist()
                scores[f"{name}_reason"] += reasons
            else:
                scores[name] += scorer(images, list(part.prompt)).tolist()
    return scores
