"""Score a folder of images: find out which prompt is whose, check every image, and score what is not scored yet."""

import hashlib
import json
import shutil
import sys
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from g2rpo_core.foundation.errors import UserError
from g2rpo_core.foundation.files import complaint, in_one_line, reading, whole, write_whole
from g2rpo_core.foundation.texts import unprintable, visible
from g2rpo_core.inference.pictures import INDEX, settings_of

if TYPE_CHECKING:  # these import torch, which would slow down --help
    import pandas as pd
    from PIL import Image

    from g2rpo_core.rewards.spec import Reward

SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".tif", ".tiff", ".gif")
BATCH = 64  # images open at a time, if they are small
OPEN = 2**26  # pixels of the images that are open at a time; one with more is refused


def pair(folder: Path, prompts: Path | None) -> "pd.DataFrame":
    """Return one row per image with `file` (its name in the folder) and `prompt`.

    prompts: a file with columns file,prompt, or a file of prompts whose n-th row is for the n-th image by name; None: the prompts.csv in
    the folder, or what stands in each PNG of `g2rpo generate`. UserError if folder and prompts do not fit together, or if an image
    says that it is of another prompt.
    """
    import pandas as pd

    from g2rpo_core.data.prompts import normalized

    # Images
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder")
    files = sorted(path.name for path in folder.iterdir() if path.suffix.lower() in SUFFIXES)
    if not files:
        raise UserError(f"{folder}: holds no image ({', '.join(SUFFIXES)})")
    if bad := [visible(file) for file in files if unprintable(file)]:
        raise UserError(f"{folder}: {in_one_line(bad)}: the name is not UTF-8: rename it")
    # One prompt per image
    said = {file: own for file in files if (own := _own_prompt(folder / file)) is not None}
    if prompts is None and (folder / INDEX).exists():
        prompts = folder / INDEX
    if prompts is None:
        if missing := [file for file in files if file not in said]:
            raise UserError(f"{folder}: {missing[0]} does not say its prompt: give --prompts")
        return pd.DataFrame({"file": files, "prompt": [said[file] for file in files]})
    table = pd.DataFrame(list(_rows(folder, prompts, files)), columns=["file", "prompt"])
    if (table.prompt == "").any():
        raise UserError(f"{prompts}: the prompt of {table.file[table.prompt == ''].iloc[0]} is empty")
    other = [file for file, prompt in zip(table.file, table.prompt) if normalized(said.get(file, prompt)) != prompt]
    if other:
        raise UserError(
            f"{prompts}: gives {in_one_line(other)} another prompt than the one that the picture says it is of: leave --prompts away"
        )
    return table


def _rows(folder: Path, prompts: Path, files: list[str]) -> Iterator[tuple[str, str]]:
    """Yield each image with its prompt, from a file of prompts; UserError if it does not fit."""
    from g2rpo_core.data.prompts import normalized, read_rows

    rows = read_rows(prompts)
    texts = [normalized(row["prompt"] if isinstance(row["prompt"], str) else "") for row in rows.values()]
    named = [row["file"] for row in rows.values() if isinstance(row.get("file"), str)]
    if not named and prompts.suffix != ".csv":
        if len(rows) != len(files):
            raise UserError(f"{prompts}: {len(rows)} lines for the {len(files)} images in {folder}; need one line per image")
        yield from zip(files, texts)
        return
    if not named:
        raise UserError(f"{prompts}: needs columns file,prompt; has {','.join(rows[1]) if rows else 'no row'}")
    if len(named) < len(rows):
        raise UserError(f"{prompts}: {len(named)} of {len(rows)} rows have a file: name one in every row, or in none")
    if unknown := sorted(set(named) - set(files)):
        raise UserError(f"{prompts}: {unknown[0]} is not an image in {folder}")
    yield from zip(named, texts)


def _own_prompt(path: Path) -> str | None:
    """Return the prompt that stands in a PNG of `g2rpo generate`; None for any other image."""
    prompt = (settings_of(path) or {}).get("prompt") if path.suffix.lower() == ".png" else None
    return prompt if isinstance(prompt, str) else None


def read_image(path: Path) -> "Image.Image":
    """Read a whole image file, 16 bits a value as 8; UserError if it is no image, damaged, too large, or of a range that is not known."""
    from PIL import Image

    from g2rpo_core.rewards.preprocess import in_eight_bits

    with warnings.catch_warnings(), reading(whole(path)):
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # our own limit is below
        image = Image.open(path)
    with image, reading(path):
        frames = getattr(image, "n_frames", 1)
        if (pixels := image.width * image.height) > OPEN:
            raise UserError(complaint(path, f"has {pixels / 1e6:.0f} megapixels, more than {OPEN / 1e6:.0f}"))
        image.load()
        image.info["frames"] = frames
        try:
            return in_eight_bits(image)
        except ValueError as error:
            raise UserError(complaint(path, str(error))) from None


def check_images(folder: Path, files: list[str]) -> list[int]:
    """Read every image once, and return the pixels of each; UserError naming all that cannot be scored.

    Print which have more than a first frame.
    """
    from tqdm import tqdm

    pixels, wrong, moving = [], [], []
    for file in tqdm(files, desc="check", unit="image"):
        try:
            image = read_image(folder / file)
        except UserError as error:
            wrong.append(str(error))
            continue
        pixels.append(image.width * image.height)
        if (frames := image.info.get("frames", 1)) > 1:
            moving.append(f"{file} (the first frame of {frames})")
    if wrong:
        raise UserError(in_one_line(wrong))
    if moving:
        print(f"note: of what moves, one frame is scored: {visible(in_one_line(moving))}", file=sys.stderr)
    return pixels


def batches(pixels: list[int]) -> list[slice]:
    """Return the parts in which images are scored: up to BATCH, and OPEN pixels."""
    parts, start = [], 0
    for end in range(1, len(pixels) + 1):
        if end == len(pixels) or end - start == BATCH or sum(pixels[start : end + 1]) > OPEN:
            parts.append(slice(start, end))
            start = end
    return parts


class Parts:
    """The scores so far, in a folder beside the table that they will be: a second start goes on from them.

    Its name depends on all that decides the scores, such as the files' sizes and times.
    """

    def __init__(self, out: Path, folder: Path, table: "pd.DataFrame", decides: object):
        files = [(file, *_state(folder / file)) for file in table.file]
        text = json.dumps([decides, table.to_dict("list"), files], sort_keys=True, default=str)
        self.folder = out.with_name(f".{out.name}.{hashlib.sha256(text.encode()).hexdigest()[:16]}.parts")
        self.folder.mkdir(parents=True, exist_ok=True)

    def get(self, part: slice) -> "pd.DataFrame | None":
        """Return the scores of a part; None if they are missing or one could not be had."""
        from g2rpo_core.foundation.files import read_table

        file = self._file(part)
        if not file.exists():
            return None
        scores = read_table(file)
        reasons = scores.filter(regex="_reason$")
        return scores if reasons.isna().all(axis=None) else None

    def put(self, part: slice, scores: "pd.DataFrame") -> None:
        """Keep the scores of a part."""
        write_whole(self._file(part), scores.to_parquet(index=False))

    def discard(self) -> None:
        """Remove them: the table is written."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def _file(self, part: slice) -> Path:
        return self.folder / f"{part.start:07d}-{part.stop:07d}.parquet"


def _state(path: Path) -> tuple[int, int]:
    stat = path.stat()
    return stat.st_size, stat.st_mtime_ns


def score_images(folder: Path, table: "pd.DataFrame", scorers: "Mapping[str, Reward]", kept: Parts) -> "pd.DataFrame":
    """Return new columns for the table: the scores of each reward, and the reasons for missing ones.

    UserError naming all images that cannot be read, before any is scored.
    """
    import pandas as pd
    from tqdm import tqdm

    from g2rpo_core.rewards.scoring import score_one
    from g2rpo_core.rewards.spec import RewardWithReasons

    done = []
    for part in tqdm(batches(check_images(folder, list(table.file))), desc="score", unit="part"):
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
