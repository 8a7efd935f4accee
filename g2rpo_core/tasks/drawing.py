"""Draw the shapes of tasks, and find the colour of each pixel."""

from functools import cache

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image, ImageDraw

BACKGROUND = (236, 236, 232)
COLORS = {
    "red": (214, 40, 40),
    "green": (44, 150, 70),
    "blue": (40, 80, 200),
    "yellow": (244, 196, 20),
    "purple": (150, 50, 170),
    "black": (30, 30, 34),
}
CLOSE = 0.25  # of two colours in [0, 1]^3
SUPERSAMPLING = 8
SHAPES = ("circle", "square", "triangle", "cross")


@cache
def stencil(shape: str, radius: float, size: int, dx: int = 0, dy: int = 0) -> np.ndarray:
    """Return the coverage [size, size] in [0, 1] of a shape at (size / 2 + dx, size / 2 + dy).

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
    """Blend a colour into an image [3, H, W] in [0, 255] by coverage [H, W]."""
    return image * (1 - cover) + np.array(color, np.float32)[:, None, None] * cover


def canvas(color: tuple[int, int, int], size: int) -> np.ndarray:
    """Return an image [3, size, size] of one colour, float32 in [0, 255]."""
    return np.broadcast_to(np.array(color, np.float32)[:, None, None], (3, size, size)).copy()


def nearest_color(images: torch.Tensor) -> torch.Tensor:
    """Label pixels of images [N, 3, H, W] in [0, 1] by palette index [N, H, W].

    0 is the background, then COLORS in order. Anti-aliased edges between an object and the
    background may lie nearest to a third colour, so a pixel that is not close to any palette entry
    takes the label that most of its 3x3 neighbourhood has.
    """
    palette = torch.tensor([BACKGROUND, *COLORS.values()]).float() / 255
    # [N, palette, H, W]
    distance = (images[:, :, None] - palette.T[None, :, :, None, None]).square().sum(1).sqrt()
    nearest, labels = distance.min(1)
    sure = F.one_hot(labels, len(palette)).permute(0, 3, 1, 2).float() * (nearest < CLOSE)[:, None]
    votes = F.avg_pool2d(F.pad(sure, (1, 1, 1, 1)), 3, stride=1)
    return torch.where((nearest < CLOSE) | (votes.sum(1) == 0), labels, votes.argmax(1))
