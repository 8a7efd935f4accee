"""Pictures of every kind that users score: square, wide, tall, tiny, grey, with transparency, with a palette."""

import numpy as np
from PIL import Image


def photograph(width: int, height: int, seed: int = 0) -> Image.Image:
    """Smooth and sharp parts at every scale, so that a wrong resampling shows."""
    rng = np.random.default_rng(seed)
    layers = [
        Image.fromarray(rng.integers(0, 256, (size, size, 3), dtype=np.uint8)).resize((width, height), Image.Resampling.BICUBIC)
        for size in (2, 7, 40)
    ]
    return Image.blend(Image.blend(layers[0], layers[1], 0.4), layers[2], 0.3)


def alpha(picture: Image.Image) -> Image.Image:
    transparent = picture.convert("RGBA")
    transparent.putalpha(Image.linear_gradient("L").resize(picture.size))
    return transparent


PICTURES = {
    "square": photograph(64, 64),
    "wide": photograph(301, 97, 1),
    "tall": photograph(90, 247, 2),
    "odd": photograph(255, 254, 3),
    "tiny": photograph(5, 3, 4),
    "grey": photograph(120, 80, 5).convert("L"),
    "palette": photograph(120, 81, 6).convert("P"),
    "transparent": alpha(photograph(100, 121, 7)),
}
PROMPTS = [f"a {size} {color} circle {place}" for size, color, place in [
    ("large", "red", "at the left"), ("small", "blue", "in the middle"), ("large", "green", "at the top right"), ("small", "black", "at the bottom"),
    ("small", "purple", "at the top"), ("large", "yellow", "at the right"), ("large", "blue", "left of a small red cross"), ("large", "black", "above a large red cross"),
]]  # fmt: skip
