"""Score a folder of images: match prompts, check every image, and score what is not scored yet."""

import hashlib
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path, PurePosixPath

import pandas as pd

from g2rpo_core.data.rows import COLUMNS, read_rows
from g2rpo_core.foundation.errors import UserError
from g2rpo_core.foundation.files import in_one_line, reading, write_whole
from g2rpo_core.foundation.manifest import sha256
from g2rpo_core.foundation.progress import Bar
from g2rpo_core.foundation.tables import read_table
from g2rpo_core.foundation.texts import echo, natural, normalized, unprintable, unseen, visible
from g2rpo_core.inference.pictures import INDEX
from g2rpo_core.rewards.limits import MOST_LETTERS, OPEN
from g2rpo_core.rewards.preprocess import read_image
from g2rpo_core.rewards.registry import REWARDS
from g2rpo_core.rewards.scoring import score_one
from g2rpo_core.rewards.spec import Reward, RewardWithReasons

SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".tif", ".tiff", ".gif")
BATCH = 64  # images open at a time, if they are small
SCORED = Path(".cache", "scores")  # of parts of folders
# Lists of images with prompts in a folder: ours, and those of `datasets` (imagefolder)
LISTS = (INDEX, "metadata.csv", "metadata.jsonl")
# Names of columns of such a list. Only here does a column `image` or `path` name a file: sets of
# training prompts have several of them.
ACCEPTED = COLUMNS | {
    "file": (
        *COLUMNS["file"],
        *("file_path", "filepath", "image", "image_file", "image_name", "image_path"),
        *("img", "img_path", "path"),
    )
}


def list_in(folder: Path) -> Path | None:
    """Return the first of LISTS that a folder has."""
    return next((folder / name for name in LISTS if (folder / name).exists()), None)


def pair(folder: Path, prompts: Path | None) -> pd.DataFrame:
    """Return one row per image with `file` (its path in the folder) and `prompt`.

    prompts: a file that names its images, or one whose n-th row is for the n-th image in natural
    order; None: the folder's list, or else a text file beside each image. Images of subfolders have
    no lines if the folder itself has any. UserError if folder and prompts do not fit together.
    """
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder")
    if not (every := images_in(folder)):
        raise UserError(f"{folder}: holds no image ({', '.join(SUFFIXES)})")
    bad = [f"{visible(file)} has {char!a}" for file in every if (char := unprintable(file))]
    if bad:
        raise UserError(
            f"{folder}: {in_one_line(bad)}: a name must be UTF-8 without control characters: "
            "rename it"
        )
    if source := prompts or list_in(folder):
        rows = _rows_of_list(folder, source, every)
    else:
        rows = [(file, _read_beside(folder / file)) for file in _at_top(every)]
    if empty := [file for file, prompt in rows if unseen(prompt)]:
        raise UserError(f"{source or folder}: the prompt of {empty[0]} is empty")
    if long := [file for file, prompt in rows if len(prompt) > MOST_LETTERS]:
        raise UserError(
            f"{source or folder}: the prompt of {in_one_line(long)} has over {MOST_LETTERS} "
            "characters"
        )
    return pd.DataFrame(rows, columns=["file", "prompt"])


def images_in(folder: Path) -> list[str]:
    """Return the images in a folder and its subfolders, but hidden ones, in natural order."""
    found = [
        path.relative_to(folder)
        for path in folder.rglob("*")
        if path.suffix.lower() in SUFFIXES and path.is_file()
    ]
    seen = (file for file in found if not any(part.startswith(".") for part in file.parts))
    return sorted((file.as_posix() for file in seen), key=natural)


def _at_top(files: Sequence[str]) -> list[str]:
    """Return the files that are in no subfolder; all if each is in one."""
    return [file for file in files if "/" not in file] or list(files)


def _rows_of_list(folder: Path, prompts: Path, files: Sequence[str]) -> list[tuple[str, str]]:
    """Pair images with prompts from a file; UserError if it does not fit."""
    by_name = prompts.suffix == ".csv" or prompts.name in LISTS
    needed = ("file", "prompt") if by_name else ("prompt",)
    rows = read_rows(prompts, accepted=ACCEPTED, needed=needed).values()
    texts = [normalized(row["prompt"] if isinstance(row["prompt"], str) else "") for row in rows]
    names = [str(PurePosixPath(row["file"])) for row in rows if isinstance(row.get("file"), str)]
    if by_name or names:
        if len(names) < max(1, len(rows)):
            raise UserError(
                f"{prompts}: {len(names)} of {len(rows)} rows have a file: name one in every row"
            )
        if unknown := sorted(set(names) - set(files), key=natural):
            raise UserError(f"{prompts}: {visible(unknown[0])} is not an image in {folder}")
        return list(zip(names, texts))
    top = _at_top(files)
    if len(texts) != len(top):
        raise UserError(
            f"{prompts}: {len(texts)} lines for the {len(top)} images in {folder}; "
            "need one line per image"
        )
    ends = [f"{visible(file)} is {visible(text)!r}" for file, text in zip(top, texts)]
    echo(
        "note: line n is for the n-th image in natural order: "
        f"{', …, '.join(dict.fromkeys((ends[0], ends[-1])))}",
        file=sys.stderr,
    )
    return list(zip(top, texts))


def _read_beside(image: Path) -> str:
    """Return the prompt in the text file beside an image; UserError without one."""
    path = image.with_suffix(".txt")
    if not path.exists():
        raise UserError(f"{image}: has no prompt: give --prompts, or write it into {path.name}")
    with reading(path):
        prompt = normalized(path.read_text(encoding="utf-8-sig"))
    if control := unprintable(prompt):
        raise UserError(f"{path}: has the control character {control!a}")
    return prompt


def check_images(folder: Path, files: Sequence[str], rewards: Iterable[str] = ()) -> list[int]:
    """Read every image once, and return each one's pixels.

    rewards: the names of those that are to score them. UserError naming all images that cannot be
    read, or that one of the rewards does not take.
    """
    limits = {name: REWARDS[name].problem_of_image for name in rewards if name in REWARDS}
    pixels, wrong = [], []
    for file in Bar(files, desc="check", unit="image"):
        try:
            image = read_image(folder / file)
        except UserError as error:
            wrong.append(str(error))
            continue
        wrong += [
            f"{folder / file}: {name}: {problem}"
            for name, problem_of in limits.items()
            if (problem := problem_of(image.width, image.height))
        ]
        pixels.append(image.width * image.height)
    if wrong:
        raise UserError(in_one_line(wrong))
    return pixels


def batches(pixels: Sequence[int]) -> list[slice]:
    """Return the parts in which images are scored: up to BATCH, and OPEN pixels."""
    parts, start = [], 0
    for end in range(1, len(pixels) + 1):
        if end == len(pixels) or end - start == BATCH or sum(pixels[start : end + 1]) > OPEN:
            parts.append(slice(start, end))
            start = end
    return parts


def score_images(
    folder: Path, table: pd.DataFrame, scorers: Mapping[str, Reward], decides: object
) -> pd.DataFrame:
    """Return new columns for the table: each reward's scores, and reasons for missing ones.

    Parts that are whole are kept in SCORED, by a hash of all that decides their scores: the images,
    the prompts and `decides`. UserError naming all images that cannot be scored, before any is.
    """
    done = []
    pixels = check_images(folder, list(table.file), scorers)
    for part in Bar(batches(pixels), desc="score", unit="part"):
        rows = table.iloc[part]
        images = [sha256(folder / file) for file in rows.file]
        text = json.dumps([decides, images, list(rows.prompt)], sort_keys=True, default=str)
        kept = SCORED / f"{hashlib.sha256(text.encode()).hexdigest()}.parquet"
        if kept.exists():
            done.append(read_table(kept))
            continue
        done.append(_score(folder, rows, scorers))
        if done[-1][list(scorers)].notna().all(axis=None):
            SCORED.mkdir(parents=True, exist_ok=True)
            write_whole(kept, done[-1].to_parquet(index=False))
    return pd.concat(done, ignore_index=True)


def _score(folder: Path, rows: pd.DataFrame, scorers: Mapping[str, Reward]) -> pd.DataFrame:
    images = [read_image(folder / file) for file in rows.file]
    columns: dict[str, object] = {}
    for name, scorer in scorers.items():
        values, reasons = score_one(scorer, images, list(rows.prompt))
        columns[name] = values.tolist()
        if isinstance(scorer, RewardWithReasons):
            columns[f"{name}_reason"] = pd.Series(reasons, dtype="string")
    return pd.DataFrame(columns)
