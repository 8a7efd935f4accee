"""Score whether an image shows the text in its prompt's quotation marks, as Flow-GRPO does.

Flow-GRPO (flow_grpo/ocr.py) knows "" alone; marks of other languages count as well (`QUOTES`). A
single straight mark does not: it is an apostrophe.

The text is read by RapidOCR, whose models come with the package, so nothing is downloaded;
Flow-GRPO reads with PaddleOCR. Spaces and case do not count, nor the forms of a character that
look alike (`written`). The score is 1 - min(D, L) / L: D is the edit distance between what is read
and the text of L characters, and 0 if the text is part of what is read. Of texts in ASCII it is
Flow-GRPO's.
"""

import math
import re
import threading
import unicodedata
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import torch
from pydantic import Field

from g2rpo_core.foundation.errors import attempt
from g2rpo_core.foundation.settings import Count
from g2rpo_core.foundation.texts import IGNORABLE
from g2rpo_core.rewards import limits
from g2rpo_core.rewards.preprocess import Images, check_pairs, eight_bit
from g2rpo_core.rewards.spec import RewardSettings, RewardSpec, RewardWithReasons

# Opening marks -> those that may close them; ‘ ’ and ‚ ‘ count where ’ is no apostrophe, followed
# by a letter
QUOTES = {
    '"': '"',
    "“": "”“",
    "”": "”",
    "„": '“”"',
    "‟": "”",
    "«": "»",
    "»": "«",
    "‹": "›",
    "›": "‹",
    "「": "」",
    "『": "』",
    "〝": "〞〟",
    "＂": "＂",
    "｢": "｣",
    "《": "》",
    "‘": "’",
    "‚": "‘’",
}
QUOTED = re.compile(
    "|".join(
        f"{mark}([^{mark}{closing}]*?)[{closing}]"
        if mark not in "‘‚"
        else rf"{mark}(.*?)[{closing}](?!\w)"
        for mark, closing in QUOTES.items()
    )
)
# The reader (rapidocr 3.10.0, PP-OCRv6) writes some of these as others
ALIKE = str.maketrans(
    dict.fromkeys("‘’ʼ′", "'") | dict.fromkeys("“”″", '"') | dict.fromkeys("‐‑‒–—―−", "-")
)
DOTS = re.compile(r"\.{2,}|…")  # it reads of an ellipsis two dots
# Channels, height and least width of a line that is recognized; RapidOCR pads to 320, which takes
# three times as long and reads as well
SHORTEST = [3, 48, 96]
# Times that an image may be as high as wide: RapidOCR enlarges the narrow side to 736 pixels, and
# pads only what is wider than 8:1. 3 x 300 pixels took 74 s and 10 GB
HIGHEST = 8
Read = Callable[[torch.Tensor], str]
QUIET = {"Global.log_level": "critical"}


class OCRSettings(RewardSettings):
    """Settings of the reward for text in images."""

    min_confidence: float = Field(
        0.5,
        ge=0,
        le=1,
        description="Recognized lines below this confidence are dropped; 0.5 as in PaddleOCR.",
    )
    detect: bool = Field(
        True,
        description="Find the lines of text before they are read; "
        "`false`: the whole image is one line, which is faster.",
    )
    threads: Count = Field(4, description="Images read concurrently in each process.")


def written(text: str) -> str:
    """Return the text in lower case without its spaces, in Unicode's NFKC but for its ellipses.

    There is one form of quotes, apostrophes and dashes (ALIKE).
    """
    parts = IGNORABLE.sub("", text).translate(ALIKE).split("…")
    return "".join("…".join(unicodedata.normalize("NFKC", part) for part in parts).split()).lower()


def text_asked(prompt: str) -> str:
    """Return the first text in `QUOTES`, as `written`; ValueError without one."""
    match = QUOTED.search(prompt)
    if match is None or not (text := written(match[match.lastindex or 0])):
        raise ValueError("the prompt has no text in double quotes")
    return text


def similarity(read: str, asked: str) -> float:
    """Return 1 - min(edit distance, length) / length in [0, 1]; 1 if `asked` is part of `read`.

    Both are as `written`; the length is that of `asked`.
    """
    from rapidfuzz.distance import Levenshtein

    if "…" in asked:
        read, asked = DOTS.sub("…", read), DOTS.sub("…", asked)
    else:
        read = read.replace("…", "...")
    distance = 0 if asked in read else Levenshtein.distance(read, asked)
    return 1 - min(distance, len(asked)) / len(asked)


class OCR(RewardWithReasons):
    """score(images, prompts) -> [N] float32 in [0, 1], NaN for a prompt without a text.

    Images are rounded to 8 bits, as in files. read: the text in an image [3, H, W] uint8, its lines
    joined; `threads` call it at the same time, for an image each.
    """

    def __init__(self, read: Read, threads: int):
        self.read, self.pool = read, ThreadPoolExecutor(threads)

    def score_with_reasons(
        self, images: Images, prompts: Sequence[str]
    ) -> tuple[torch.Tensor, list[str | None]]:
        """Return scores [N], and for each what was read, or why it is NaN: nothing is asked for."""
        check_pairs(images, prompts)
        pixels = eight_bit(images)
        reasons = [
            problem_of_prompt(prompt) or problem_of_image(image.shape[2], image.shape[1])
            for image, prompt in zip(pixels, prompts)
        ]
        texts = list(
            self.pool.map(lambda image, reason: "" if reason else self.read(image), pixels, reasons)
        )
        scores = [
            math.nan if reason else similarity(written(text), text_asked(prompt))
            for text, prompt, reason in zip(texts, prompts, reasons)
        ]
        return torch.tensor(scores), [
            reason or f"read {text!r}" for reason, text in zip(reasons, texts)
        ]

    def note(self, prompts: Sequence[str]) -> str | None:
        """Say which letters of the texts no reader here can write; None if there is none."""
        asked = [text_asked(prompt) for prompt in prompts if not problem_of_prompt(prompt)]
        if not (lacking := [text for text in asked if not letters() >= set(text)]):
            return None
        return (
            f"cannot read {' '.join(sorted(set(''.join(lacking)) - letters()))}: "
            f"{len(lacking)} of {len(prompts)} prompts ask for them, "
            "and none of their images can score 1"
        )


@cache
def letters() -> frozenset[str]:
    """Return the characters that the reader can write, as `written`; it knows no others."""
    from rapidocr import RapidOCR

    reader = RapidOCR(params=QUIET)._load_rec_model()
    return frozenset(written("".join(reader.session.get_character_list())))


def problem_of_prompt(prompt: str) -> str | None:
    """Say why no image of this prompt can have a score; None if it can."""
    return next(iter(attempt(lambda: text_asked(prompt), ValueError)[1]), None)


def problem_of_image(width: int, height: int) -> str | None:
    """Say why no image of this size can have a score; None if it can."""
    if height > HIGHEST * width:
        return (
            f"has {width} x {height} pixels: text is read in images up to {HIGHEST} times as high "
            "as wide: crop it"
        )
    return limits.problem_of_image(width, height)


def make_reader(settings: OCRSettings) -> Read:
    """Make the function that reads an image's text: RapidOCR on the CPU, without turning lines.

    Its models come with the package. Each thread has models of its own, on one thread: more for one
    image would wait for each other where cores are shared.
    """
    from rapidocr import RapidOCR

    own = threading.local()
    params: dict[str, object] = (
        QUIET
        | {
            "Global.use_det": settings.detect,
            "Global.use_cls": False,
            "Global.text_score": settings.min_confidence,
            "EngineConfig.onnxruntime.intra_op_num_threads": 1,
            "EngineConfig.onnxruntime.inter_op_num_threads": 1,
        }
        | ({} if settings.detect else {"Rec.rec_img_shape": SHORTEST})
    )

    def read(image: torch.Tensor) -> str:
        if not hasattr(own, "recognize"):
            own.recognize = RapidOCR(params=params)
        # blue first, as OpenCV has it
        lines = own.recognize(image.flip(0).permute(1, 2, 0).contiguous().numpy())
        # RapidOCR (3.10.0) itself drops lines only where it has detected them
        return "".join(
            text
            for text, confidence in zip(lines.txts or (), lines.scores or ())
            if confidence >= settings.min_confidence
        )

    return read


# With and without detection, on one core of an Intel Xeon (family 6, model 207) in November 2026;
# at 32 to 720 pixels: detection takes twice as long at 1,024
SECONDS = {True: 0.6, False: 0.02}
SPEC = RewardSpec(
    "ocr",
    "OCR accuracy",
    lambda models, device, settings: OCR(make_reader(settings), settings.threads),
    settings=OCRSettings,
    host_seconds=lambda settings: SECONDS[settings.detect] / settings.threads,
    requires=("rapidocr", "onnxruntime", "rapidfuzz"),
    problem_of_prompt=problem_of_prompt,
    problem_of_image=problem_of_image,
)
