"""Score whether an image shows the text in its prompt's quotation marks, as Flow-GRPO does.

Flow-GRPO (flow_grpo/ocr.py) knows "" alone; marks of other languages count as well (`QUOTES`). A
single straight mark does not: it is an apostrophe.

The text is read by RapidOCR, whose models come with the package, so nothing is downloaded;
Flow-GRPO reads with PaddleOCR. Spaces and case do not count. The score is 1 - min(D, L) / L: D is
the edit distance between what is read and the text of L characters, and 0 if the text is part of
what is read.
"""

import math
import re
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from pydantic import Field

from g2rpo_core.foundation.errors import attempt
from g2rpo_core.foundation.settings import Count
from g2rpo_core.hub.model_store import ModelStore
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
# Channels, height and least width of a line that is recognized; RapidOCR pads to 320, which takes
# three times as long and reads as well
SHORTEST = [3, 48, 96]
# Times that an image may be as high as wide: RapidOCR enlarges the narrow side to 736 pixels, and
# pads only what is wider than 8:1. 3 x 300 pixels took 74 s and 10 GB
HIGHEST = 8
Read = Callable[[torch.Tensor], str]


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


def without_spaces(text: str) -> str:
    """Return the text in lower case without its spaces."""
    return "".join(text.split()).lower()


def text_asked(prompt: str) -> str:
    """Return the first text in `QUOTES`, lower-case, without spaces; ValueError without one."""
    match = QUOTED.search(prompt)
    if match is None or not (text := without_spaces(match[match.lastindex or 0])):
        raise ValueError("the prompt has no text in double quotes")
    return text


def similarity(read: str, asked: str) -> float:
    """Return 1 - min(edit distance, length) / length in [0, 1]; 1 if `asked` is part of `read`.

    Neither has spaces or capitals; the length is that of `asked`.
    """
    from rapidfuzz.distance import Levenshtein

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
            math.nan if reason else similarity(without_spaces(text), text_asked(prompt))
            for text, prompt, reason in zip(texts, prompts, reasons)
        ]
        return torch.tensor(scores), [
            reason or f"read {text!r}" for reason, text in zip(reasons, texts)
        ]


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
    params = {
        "Global.use_det": settings.detect,
        "Global.log_level": "critical",
        "Global.use_cls": False,
        "Global.text_score": settings.min_confidence,
        "EngineConfig.onnxruntime.intra_op_num_threads": 1,
        "EngineConfig.onnxruntime.inter_op_num_threads": 1,
    }

    if not settings.detect:
        params["Rec.rec_img_shape"] = SHORTEST

    def read(image: torch.Tensor) -> str:
        if not hasattr(own, "recognize"):
            own.recognize = RapidOCR(params=params)
        # blue first, as OpenCV has it
        return "".join(
            own.recognize(image.flip(0).permute(1, 2, 0).contiguous().numpy()).txts or ()
        )

    return read


def _build(models: ModelStore, device: torch.device, settings: OCRSettings) -> OCR:
    return OCR(make_reader(settings), settings.threads)


# With and without detection, on one core of an Intel Xeon (family 6, model 207) in November 2026;
# at 32 to 720 pixels: detection takes twice as long at 1,024
SECONDS = {True: 0.6, False: 0.02}
SPEC = RewardSpec(
    "ocr",
    "OCR accuracy",
    _build,
    settings=OCRSettings,
    host_seconds=lambda settings: SECONDS[settings.detect] / settings.threads,
    requires=("rapidocr", "onnxruntime", "rapidfuzz"),
    problem_of_prompt=problem_of_prompt,
    problem_of_image=problem_of_image,
)
