"""Draw docs/pictures/hacked.png from the study `words`: the same words by every reward.

After `python -m studies run words`. On the study's first base and seed it shows the words that rose
most and fell most in OCR by training on it alone, and some drawn at random; above each row is what
OCR read, in the order of the columns.
"""

from itertools import islice
from pathlib import Path

import pandas as pd
from PIL import Image
from torchvision.transforms.functional import to_tensor

from g2rpo_core.config import load_profile, load_study, profile_path
from g2rpo_core.data.prompts import load_prompts
from g2rpo_core.evaluation.results import image_folder
from g2rpo_core.inference.pictures import side_by_side
from g2rpo_core.reporting.images import FIRST, choose
from g2rpo_core.reporting.tables import changes
from studies.bases import of_base

ROOT = Path(__file__).resolve().parent.parent


def main() -> None:
    """Draw the picture."""
    study = load_study("words")
    evaluation = load_profile(profile_path(study.profile), study).evaluation
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
    read = scores.set_index(["method", "prompt_id"]).reason.str.removeprefix("read ")
    chosen = choose(
        changes(scores, ("ocr", study.seeds[0]), ("base", 0), {"ocr": 1.0}),
        sorted(set(scores.prompt_id)),
    )
    texts = {
        prompt.id: prompt.text
        for prompt in load_prompts(ROOT / "prompts" / study.profile / "test.parquet")
    }
    rows = {
        key: f"{how}: {texts[key]}, read {', '.join(read[method, key] for method, _ in runs)}"
        for how, some in chosen.items()
        for key in islice(some, FIRST)
    }
    folder = image_folder("final", evaluation.steps[0])
    drawn = {
        label: [
            to_tensor(Image.open(home / f"{method}-{seed}" / folder / f"{key}.png"))[None]
            for key in rows
        ]
        for (method, seed), label in runs.items()
    }
    path = ROOT / "docs" / "pictures" / "hacked.png"
    sheet = side_by_side(drawn, list(rows.values()), [evaluation.seed])
    sheet.quantize(128).save(path, optimize=True)
    print(path)


if __name__ == "__main__":
    main()
