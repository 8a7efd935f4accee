"""The outlines of shapes, as worlds paint them and look for them."""

from functools import cache

import numpy as np
from PIL import Image, ImageDraw

SUPERSAMPLING = 8
SHAPES = ("circle", "square", "triangle", "cross")


@cache
def stencil(shape: str, radius: float, size: int, dx: int = 0, dy: int = 0) -> np.ndarray:
    """Coverage [size, size] in [0, 1] of one shape centred at (size / 2 + dx, size / 2 + dy).

    radius: half the side of its bounding box, in pixels. ValueError for an unknown shape.
    """
    scale = SUPERSAMPLING
    canvas = Image.new("L", (size * scale, size * scale))
    draw = ImageDraw.Draw(canvas)
    cx, cy, r = (size / 2 + dx) * scale, (size / 2 + dy) * scale, radius * scale
    if shape == "circle":
        draw.ellipse((cx - r, cy - r, cx + r, cy + r), fill=255)
    elif shape == "square":
        draw.rectangle((cx - r, cy - r, cx + r - 1, cy + r - 1), fill=255)
    elif shape == "triangle":
        draw.polygon(((cx, cy - r), (cx + r, cy + r), (cx - r, cy + r)), fill=255)
    elif shape == "cross":
        draw.rectangle((cx - r, cy - r / 3, cx + r, cy + r / 3), fill=255)
        draw.rectangle((cx - r / 3, cy - r, cx + r / 3, cy + r), fill=255)
    else:
        raise ValueError(f"shape must be one of {SHAPES}, got {shape!r}")
    return np.asarray(canvas.resize((size, size), Image.Resampling.BOX), dtype=np.float32) / 255


def paint(image: np.ndarray, cover: np.ndarray, color: tuple[int, int, int]) -> np.ndarray:
    """The image [3, H, W], in [0, 255], with a colour over the covered share [H, W] of each pixel."""
    return image * (1 - cover) + np.array(color, np.float32)[:, None, None] * cover


def canvas(color: tuple[int, int, int], size: int) -> np.ndarray:
    """An image [3, size, size] of one colour, float32 in [0, 255]."""
    return np.broadcast_to(np.array(color, np.float32)[:, None, None], (3, size, size)).copy()
