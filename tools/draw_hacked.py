"""Draw docs/pictures/hacked.png from the study `words`: the same words by every reward.

`python -m tools.draw_hacked`, after `python -m studies run words`. On the study's first base and
seed it shows the words that rose most and fell most in OCR by training on it alone, and some drawn
at random; under each image is what OCR read.
"""

from itertools import islice
from pathlib import Path

import pandas as pd
from PIL import Image, ImageDraw, ImageFont

from g2rpo_core.config import load_study
from g2rpo_core.data.prompts import load_prompts
from g2rpo_core.evaluation.results import image_folder
from g2rpo_core.reporting.images import FIRST, choose
from g2rpo_core.reporting.tables import changes
from studies.bases import of_base

ROOT = Path(__file__).resolve().parent.parent
STEPS = 10
SCALE = 3  # of images of 32 pixels
LABEL, GAP, LINE = 190, 6, 16  # pixels: left of a row, between images, and a line of text
INK, SOFT = "#1b1f24", "#57606a"


def main() -> None:
    """Draw the picture."""
    study = load_study("words")
    home = ROOT / "studies" / of_base(study, study.bases[0]).study / "evaluations"
    runs = {("base", 0): "base"} | {
        (name, study.seeds[0]): entry.label or name
        for name, entry in study.entries.items()
        if entry.method == "nft_shared"
    }
    scores = pd.concat(
        pd.read_parquet(home / f"{method}-{seed}" / "results.parquet") for method, seed in runs
    )
    scores = scores[scores.reward == "ocr"]
    read = scores.set_index(["method", "prompt_id"]).reason
    chosen = choose(
        changes(scores, ("ocr", study.seeds[0]), ("base", 0), {"ocr": 1.0}),
        sorted(set(scores.prompt_id)),
    )
    columns = [(how, key) for how, some in chosen.items() for key in islice(some, FIRST)]
    texts = {
        prompt.id: prompt.text
        for prompt in load_prompts(ROOT / "prompts" / study.profile / "test.parquet")
    }
    # The sheet: a column a word, a row an entry
    side = 32 * SCALE
    font, small = ImageFont.load_default(13), ImageFont.load_default(11)
    top = 3 * LINE
    size = (LABEL + len(columns) * (side + GAP), top + len(runs) * (side + LINE + GAP))
    sheet = Image.new("RGB", size, "white")
    draw = ImageDraw.Draw(sheet)
    for number, (how, key) in enumerate(columns):
        left = LABEL + number * (side + GAP)
        _, word, color = texts[key].split('"')
        if number % FIRST == 0:
            draw.text((left, 0), how, INK, font)
        draw.text((left, LINE), f"{word.replace(' ', '')}{color}", INK, font)
    for number, ((method, seed), label) in enumerate(runs.items()):
        y = top + number * (side + LINE + GAP)
        draw.text((0, y + side // 2 - LINE // 2), label, INK, font)
        for column, (_, key) in enumerate(columns):
            left = LABEL + column * (side + GAP)
            folder = home / f"{method}-{seed}" / image_folder("final", STEPS)
            with Image.open(folder / f"{key}.png") as image:
                enlarged = image.convert("RGB").resize((side, side), Image.Resampling.NEAREST)
            sheet.paste(enlarged, (left, y))
            draw.text((left, y + side + 1), read[method, key], SOFT, small)
    path = ROOT / "docs" / "pictures" / "hacked.png"
    sheet.quantize(128).save(path, optimize=True)
    print(path)


if __name__ == "__main__":
    main()
