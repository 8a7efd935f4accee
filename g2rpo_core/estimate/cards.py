"""Usual cards: memory, peak, and the share of the peak that a transformer's forward reached.

A share is operations over seconds, by FLUX.1-dev's operations as `models/cost.py` counts them.
Those of others are of whole images, with text encoders and VAE, so the transformer's own is a
little higher.
"""

from typing import NamedTuple

from g2rpo_core.estimate.machines import Rate
from g2rpo_core.foundation.errors import UserError

OURS = "measured, benchmarks/README.md"
XDIT = "github.com/xdit-project/xDiT, docs/performance/flux.md"
LIKE_H100 = 0.36


class Card(NamedTuple):
    """One card."""

    memory: float
    """GiB, as torch sees it."""
    peak: float
    """TFLOP/s of dense products in bfloat16 with sums in float32, by the data sheet."""
    share: float = LIKE_H100
    """Of the peak, in a forward."""
    source: str = f"its share of the peak is not known: an H100's, {LIKE_H100:.0%}, is assumed"
    """Of the share."""
    compiled: float | None = None
    """Share with compiled blocks."""


CARDS: dict[str, Card] = {
    # xDiT: 28 steps at 1024 pixels in 6.71 s, compiled in 4.30 s: 0.31 and 0.49
    "h100": Card(79, 989, 0.36, OURS, 0.57),
    "h200": Card(139, 989, 0.36, "its share of the peak is an H100's: the same chip", 0.57),
    "b200": Card(178, 2250),
    "a100": Card(79, 312, 0.52, f"{XDIT}: 4 steps at 2048 pixels in 10 s"),
    "l40s": Card(
        44,
        362,
        0.34,
        "pruna.ai/blog/comparison-flux-torch-compile-tensor-rt-pruna: "
        "50 steps at 512 pixels in 8.71 s",
    ),
    "l20": Card(
        44,
        119.5,
        0.70,
        "github.com/xlite-dev/flux-faster: 28 steps at 1024 pixels in 24.94 s, compiled in 20.24 s",
        0.86,
    ),
    "5090": Card(31, 209.5),
    "4090": Card(23, 165.2),
    "3090": Card(23, 71),
}


def card_of(name: str) -> Card:
    """Return a card by its name; UserError for one that is not listed."""
    if name.lower() not in CARDS:
        raise UserError(
            f"plan: --card {name}: not one of {', '.join(CARDS)}; give --memory and --rate instead"
        )
    return CARDS[name.lower()]


def rate_of(name: str, compile: bool) -> Rate:
    """Return a card's rate, with compiled blocks if asked for and their share is known."""
    card = card_of(name)
    share = card.compiled if compile and card.compiled else card.share
    how = ", compiled" if compile and card.compiled else ""
    tflops = share * card.peak
    return Rate(
        tflops,
        source=(
            f"{name.lower()}: {tflops:.0f} TFLOP/s in bfloat16{how}, {share:.0%} of its peak; "
            f"{card.source}"
        ),
    )
