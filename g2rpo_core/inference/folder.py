"""Score a folder of images: match prompts, check every image, and score what is not scored yet."""

import hashlib
import json
import os
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from glob import escape
from pathlib import Path, PurePosixPath

import pandas as pd

from g2rpo_core.data.rows import COLUMNS, read_marked, read_rows
from g2rpo_core.foundation.claims import one_at_a_time
from g2rpo_core.foundation.errors import UserError
from g2rpo_core.foundation.files import in_one_line, reading, write_whole
from g2rpo_core.foundation.manifest import find_whole, write_manifest
from g2rpo_core.foundation.progress import Bar
from g2rpo_core.foundation.tables import read_table
from g2rpo_core.foundation.texts import (
    comparable,
    echo,
    natural,
    normalized,
    unprintable,
    unseen,
    visible,
)
from g2rpo_core.inference.pictures import INDEX, settings_of
from g2rpo_core.rewards.limits import MOST_LETTERS, OPEN
from g2rpo_core.rewards.preprocess import read_image
from g2rpo_core.rewards.registry import REWARDS
from g2rpo_core.rewards.scoring import score_one
from g2rpo_core.rewards.spec import Reward, RewardWithReasons

SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".tif", ".tiff", ".gif")
BATCH = 64  # images open at a time, if they are small
# Lists of images with prompts in a folder: ours, and those of `datasets` (imagefolder)
LISTS = (INDEX, "metadata.csv", "metadata.jsonl")
SIDECARS = (".txt", ".caption")  # a text beside an image, of its name
# Names of columns of such a list. Only here does a column `image` or `path` name a file: sets of
# training prompts have several of them.
ACCEPTED = COLUMNS | {
    "file": (
        *COLUMNS["file"],
        *("file_path", "filepath", "image", "image_file", "image_name", "image_path"),
        *("img", "img_path", "path"),
    )
}


def pair(folder: Path, prompts: Path | None) -> pd.DataFrame:
    """Return one row per image with `file` (its path in the folder) and `prompt`.

    prompts: a file that names its images, or one whose n-th row is for the n-th image in natural
    order; None: what is in the folder, the first of: a list (LISTS), a text beside each image
    (SIDECARS), what stands in each PNG of `g2rpo generate`. UserError if folder and prompts do not
    fit together, or if an image says that it is of another prompt.
    """
    # Images
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder")
    files = images_in(folder)
    if bad := [visible(file) for file in files if unprintable(file)]:
        raise UserError(f"{folder}: {in_one_line(bad)}: the name is not UTF-8: rename it")
    # One prompt per image
    if lists := {folder: prompts} if prompts else lists_in(folder, files):
        rows = [row for home, path in lists.items() for row in _rows(folder, home, path, files)]
        source = str(next(iter(lists.values())))
    else:
        rows, source = _rows_beside(folder, files), str(folder)
    if empty := [file for file, prompt in rows if unseen(prompt)]:
        raise UserError(f"{source}: the prompt of {empty[0]} is empty")
    if long := [file for file, prompt in rows if len(prompt) > MOST_LETTERS]:
        raise UserError(
            f"{source}: the prompt of {in_one_line(long)} has over {MOST_LETTERS} characters"
        )
    said = {file: own for file, _ in rows if (own := _own_prompt(folder / file)) is not None}
    if other := [
        file for file, prompt in rows if comparable(said.get(file, prompt)) != comparable(prompt)
    ]:
        away = "omit --prompts" if prompts else "correct it"
        raise UserError(
            f"{source}: gives {in_one_line(other)} another prompt than the one that the picture "
            f"says it is of: {away}"
        )
    return pd.DataFrame(rows, columns=["file", "prompt"])


def images_in(folder: Path) -> list[str]:
    """Return a folder's images, or else its subfolders', as paths in it, in natural order.

    Hidden files are none of them: `.x`, and what macOS puts beside files (`._x`, `__MACOSX`).
    UserError if there is no image.
    """
    of = lambda paths: [
        path.relative_to(folder).as_posix()
        for path in paths
        if path.suffix.lower() in SUFFIXES and path.is_file()
    ]
    seen = lambda names: [name for name in names if not _is_hidden(name)]
    if not (files := seen(of(folder.iterdir())) or seen(of(folder.rglob("*")))):
        raise UserError(f"{folder}: holds no image ({', '.join(SUFFIXES)})")
    return sorted(files, key=natural)


def _is_hidden(name: str) -> bool:
    return any(part.startswith(".") or part == "__MACOSX" for part in name.split("/"))


def lists_in(folder: Path, files: Sequence[str]) -> dict[Path, Path]:
    """Return a folder's list of prompts, or else its subfolders', by the folder of its names.

    The one that `g2rpo generate` writes wins. UserError for two others, and for a subfolder without
    one beside others with one.
    """
    found: dict[Path, Path] = {}
    homes = dict.fromkeys((folder / file).parent for file in files)
    for home in dict.fromkeys([folder, *homes]):
        there = [home / name for name in LISTS if (home / name).exists()]
        if len(there) > 1 and there[0].name != INDEX:
            raise UserError(
                f"{home}: has {there[0].name} and {there[1].name}: give one of them by --prompts"
            )
        if there:
            found[home] = there[0]
        if folder in found:
            return found
    if found and (without := [home for home in homes if home not in found]):
        raise UserError(
            f"{without[0]}: has no {' or '.join(LISTS)}, which other subfolders have: "
            "give one list by --prompts"
        )
    return found


def _rows(folder: Path, home: Path, prompts: Path, files: list[str]) -> list[tuple[str, str]]:
    """Pair images with prompts from a file; UserError if it does not fit.

    home: what the file's names are relative to.
    """
    by_name = prompts.suffix == ".csv" or prompts.name in LISTS
    needed = ("file", "prompt") if by_name else ("prompt",)
    rows = read_rows(prompts, accepted=ACCEPTED, needed=needed)
    if by_name and not rows:
        raise UserError(f"{prompts}: needs columns file,prompt; has no row")
    texts = [
        normalized(row["prompt"] if isinstance(row["prompt"], str) else "") for row in rows.values()
    ]
    named = [row["file"] for row in rows.values() if isinstance(row.get("file"), str)]
    if not named and not by_name:
        if len(rows) != len(files):
            raise UserError(
                f"{prompts}: {len(rows)} lines for the {len(files)} images in {folder}; "
                "need one line per image"
            )
        ends = [
            f"{visible(files[place])} is {visible(texts[place])!r}"
            for place in dict.fromkeys((0, len(files) - 1))
        ]
        echo(
            f"note: line n is for the n-th image in natural order: {', …, '.join(ends)}",
            file=sys.stderr,
        )
        return list(zip(files, texts))
    if len(named) < len(rows):
        raise UserError(
            f"{prompts}: {len(named)} of {len(rows)} rows have a file: name one in every row, "
            "or in none"
        )
    paths = [(home.relative_to(folder) / name).as_posix() for name in named]
    if unknown := sorted(
        {name for path, name in zip(paths, named) if not _is_image(folder, path)}, key=natural
    ):
        raise UserError(f"{prompts}: {visible(unknown[0])} is not an image in {home}")
    return list(zip(paths, texts))


def _is_image(folder: Path, file: str) -> bool:
    """Say whether a path that somebody wrote is an image in the folder."""
    path = PurePosixPath(file)
    inside = not path.is_absolute() and ".." not in path.parts and not _is_hidden(file)
    return inside and path.suffix.lower() in SUFFIXES and (folder / file).is_file()


def _rows_beside(folder: Path, files: Sequence[str]) -> list[tuple[str, str]]:
    """Pair images with the prompt in the text beside or in each; UserError for none or two."""
    rows = []
    for file in files:
        beside = [
            path for suffix in SIDECARS if (path := (folder / file).with_suffix(suffix)).is_file()
        ]
        if len(beside) > 1:
            raise UserError(
                f"{folder}: {file} has {beside[0].name} and {beside[1].name}: remove one, "
                "or give --prompts"
            )
        prompt = _read_beside(beside[0]) if beside else _own_prompt(folder / file)
        if prompt is None:
            raise UserError(
                f"{folder}: {file} does not say its prompt: give --prompts, "
                f"or write it into {Path(file).stem}.txt"
            )
        rows.append((file, prompt))
    return rows


def _read_beside(path: Path) -> str:
    """Return a text file as a prompt; UserError for a character that no encoder takes."""
    with reading(path):
        prompt = normalized(read_marked(path))
    if control := unprintable(prompt):
        raise UserError(f"{path}: has the control character {control!a}")
    return prompt


def _own_prompt(path: Path) -> str | None:
    """Return the prompt that stands in a PNG of `g2rpo generate`; None for any other image.

    UserError for one with a character that no encoder takes.
    """
    prompt = (settings_of(path) or {}).get("prompt") if path.suffix.lower() == ".png" else None
    if isinstance(prompt, str) and (control := unprintable(normalized(prompt))):
        raise UserError(f"{path}: its prompt has the character {control!a}: give another --prompts")
    return prompt if isinstance(prompt, str) else None


def check_images(folder: Path, files: list[str], rewards: Iterable[str] = ()) -> list[int]:
    """Read every image once, and return each one's pixels.

    rewards: the names of those that are to score them. UserError naming all images that cannot be
    read, or that one of the rewards does not take. Print which have more than a first frame.
    """
    limits = {name: REWARDS[name].problem_of_image for name in rewards if name in REWARDS}
    pixels, wrong, moving = [], [], []
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
        if (frames := image.info.get("frames", 1)) > 1:
            moving.append(f"{file} (the first frame of {frames})")
    if wrong:
        raise UserError(in_one_line(wrong))
    if moving:
        echo(
            f"note: of what moves, one frame is scored: {visible(in_one_line(moving))}",
            file=sys.stderr,
        )
    return pixels


def batches(pixels: list[int]) -> list[slice]:
    """Return the parts in which images are scored: up to BATCH, and OPEN pixels."""
    parts, start = [], 0
    for end in range(1, len(pixels) + 1):
        if end == len(pixels) or end - start == BATCH or sum(pixels[start : end + 1]) > OPEN:
            parts.append(slice(start, end))
            start = end
    return parts


@contextmanager
def written_alone(out: Path) -> Iterator[None]:
    """Run the block when no other process writes this table; its lock is gone afterwards."""
    path, done = out.with_name(f".{out.name}.lock"), False
    while not done:
        with one_at_a_time(path) as handle:
            # Whoever had the lock before has removed its file, which locks nobody out any more
            with suppress(FileNotFoundError):
                done = os.path.samestat(path.stat(), os.fstat(handle))
            if not done:
                continue
            try:
                yield
            finally:
                path.unlink(missing_ok=True)


class Parts:
    """The scores so far, in a folder beside the table to be: a second start goes on from them.

    Its name depends on all that decides the scores, such as the files' sizes and times. Those of
    earlier inputs are removed, so that only one process at a time may write `out`.
    """

    def __init__(self, out: Path, folder: Path, table: pd.DataFrame, decides: object):
        files = [(file, *_state(folder / file)) for file in table.file]
        text = json.dumps([decides, table.to_dict("list"), files], sort_keys=True, default=str)
        self.folder = out.with_name(
            f".{out.name}.{hashlib.sha256(text.encode()).hexdigest()[:16]}.parts"
        )
        for earlier in out.parent.glob(f".{escape(out.name)}.{'[0-9a-f]' * 16}.parts"):
            if earlier != self.folder:
                shutil.rmtree(earlier, ignore_errors=True)
        self.folder.mkdir(parents=True, exist_ok=True)

    def get(self, part: slice) -> pd.DataFrame | None:
        """Return the scores of a part; None if they are missing or one could not be had."""
        file = self._file(part)
        if find_whole(file.with_suffix(".json"), self.folder) is None:
            return None
        scores = read_table(file)
        told = [name.removesuffix("_reason") for name in scores.filter(regex="_reason$")]
        return scores if scores[told].notna().all(axis=None) else None

    def put(self, part: slice, scores: pd.DataFrame) -> None:
        """Keep the scores of a part."""
        file = self._file(part)
        write_whole(file, scores.to_parquet(index=False))
        write_manifest(file.with_suffix(".json"), self.folder, [file.name])

    def discard(self) -> None:
        """Remove them: the table is written."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def _file(self, part: slice) -> Path:
        return self.folder / f"{part.start:07d}-{part.stop:07d}.parquet"


def _state(path: Path) -> tuple[int, int]:
    stat = path.stat()
    return stat.st_size, stat.st_mtime_ns


def score_images(
    folder: Path, table: pd.DataFrame, scorers: Mapping[str, Reward], kept: Parts
) -> pd.DataFrame:
    """Return new columns for the table: each reward's scores, and reasons for missing ones.

    UserError naming all images that cannot be scored, before any is.
    """
    done = []
    pixels = check_images(folder, list(table.file), scorers)
    for part in Bar(batches(pixels), desc="score", unit="part"):
        scores = kept.get(part)
        if scores is None:
            rows, columns = table.iloc[part], {}
            images = [read_image(folder / file) for file in rows.file]
            for name, scorer in scorers.items():
                values, reasons = score_one(scorer, images, list(rows.prompt))
                columns[name] = values.tolist()
                if isinstance(scorer, RewardWithReasons):
                    columns[f"{name}_reason"] = pd.Series(reasons, dtype="string")
            scores = pd.DataFrame(columns)
            kept.put(part, scores)
        done.append(scores)
    return pd.concat(done, ignore_index=True)
