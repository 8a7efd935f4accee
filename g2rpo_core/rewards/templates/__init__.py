"""UnifiedReward's questions, word for word as its authors publish them, and a strict parser of its answers.

Three families are in use, and their scores are not interchangeable: `final_score` (the first models: elements, then one score),
`word_axes` (version 1.5: every word, then three scores) and `axes` (version 2: three scores). The published inference scripts of
https://github.com/CodeGoat24/UnifiedReward hold them as point_score_image_generation and point_score_ACS_image_generation.
Every change of wording becomes a new version beside the old one.
"""

import re
from importlib import resources

AXES = ("Alignment Score (1-5):", "Coherence Score (1-5):", "Style Score (1-5):")
TEMPLATES = {"final_score.v1": ("Final Score:",), "word_axes.v1": AXES, "axes.v1": AXES}  # name -> the labels of its scores
LOWEST, HIGHEST = 1.0, 5.0


def text_of(template: str) -> str:
    """The text of a template, which contains `{prompt}` once, for the caption."""
    return (resources.files(__name__) / f"{template}.txt").read_text(encoding="utf-8").removesuffix("\n")


def question(template: str, prompt: str) -> str:
    """The question about an image that was made for `prompt`."""
    return text_of(template).replace("{prompt}", prompt)


def parse(template: str, answer: str) -> float:
    """The score in [1, 5]: the one after the template's label, or the mean of those after its three.

    Raises ValueError, saying what is wrong, unless every label appears exactly once, followed by only a number from 1 to 5.
    """
    values = []
    for label in TEMPLATES[template]:
        if (count := answer.count(label)) != 1:
            raise ValueError(f"{label!r} appears {count} times instead of once")
        rest = answer.partition(label)[2].split("\n", 1)[0].strip()
        if not re.fullmatch(r"\d+(\.\d+)?", rest, re.ASCII) or not LOWEST <= float(rest) <= HIGHEST:
            raise ValueError(f"{rest[:40]!r} after {label!r} instead of a number from 1 to 5")
        values.append(float(rest))
    return sum(values) / len(values)
