"""Read images and turn them into model inputs, in the way of each published scorer.

The score depends on it. Every image becomes RGB first, what is transparent on white (`opaque`). The
published CLIP Score and ImageReward convert last, and Pillow (12.3.0) resizes palettes and black
and white by the nearest pixel, whatever is asked: their score of a palette is not that of its
pixels. All but PickScore drop the alpha channel, and score what nobody sees.

| reward | fits by | resamples |
|---|---|---|
| HPS-v2.1 | longest side, padded with black | the float tensor, nothing clamped |
| CLIP Score | both sides, aspect lost | PIL, rounded to 8 bits |
| PickScore | shortest side, centre cropped | PIL, rounded to 8 bits |
| ImageReward | shortest side, centre cropped | PIL, rounded to 8 bits |

A tensor is resampled as a tensor (bicubic with antialiasing, as PIL's), so it differs from a PIL
image by PIL's rounding alone.

torchvision takes 1.5 seconds to import, so it is imported only when an image is scored
(`transforms`).
"""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Literal, TypeAlias

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image

from g2rpo_core.foundation.errors import UserError
from g2rpo_core.foundation.files import complaint, reading, whole
from g2rpo_core.rewards.limits import problem_of_image

# Of CLIP's images
OPENAI_MEAN = (0.48145466, 0.4578275, 0.40821073)
OPENAI_STD = (0.26862954, 0.26130258, 0.27577711)
# Of image files, whatever their names say. Pillow has Ghostscript run one of PostScript
FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "TIFF", "GIF")
Images: TypeAlias = torch.Tensor | Sequence[Image.Image]


def transforms() -> ModuleType:
    """Return torchvision's functional transforms."""
    from torchvision.transforms.v2 import functional

    return functional


@dataclass(frozen=True)
class Preprocess:
    """Images -> [N, 3, size, size] float32, normalized by mean and std."""

    size: int
    fit: Literal["pad", "squash", "crop"]
    """How an image is fitted into the square; see the table above."""
    mean: tuple[float, ...]
    std: tuple[float, ...]
    crop_floor: bool = False
    """How an odd margin is cropped: the smaller half at the top left (transformers), or, if False,
    the even one of the two halves there (torchvision)."""

    def __call__(self, images: Images, device: torch.device) -> torch.Tensor:
        """Fit and normalize [N, 3, H, W] in [0, 1], or N PIL images of any mode and size."""
        if isinstance(images, torch.Tensor):
            fitted = self._tensor(images.to(device, torch.float32))
        else:
            fitted = torch.cat([self._image(image) for image in images]).to(device)
        return transforms().normalize(fitted, list(self.mean), list(self.std))

    def _image(self, image: Image.Image) -> torch.Tensor:
        image = opaque(image)
        if self.fit == "pad":
            return self._tensor(_to_tensor(image))
        shape = self._shape(image.height, image.width)
        image = image.resize(shape[::-1], Image.Resampling.BICUBIC)
        return self._crop(_to_tensor(image))

    def _tensor(self, images: torch.Tensor) -> torch.Tensor:

        height, width = images.shape[-2:]
        shape = self._shape(height, width)
        if shape != (height, width):
            images = transforms().resize(
                images, list(shape), transforms().InterpolationMode.BICUBIC, antialias=True
            )
            if self.fit != "pad":  # 8 bits hold no overshoot; hpsv2 keeps it
                images = images.clamp(0, 1)
        if self.fit == "pad":
            down, right = self.size - shape[0], self.size - shape[1]
            return F.pad(images, (right // 2, right - right // 2, down // 2, down - down // 2))
        return self._crop(images)

    def _shape(self, height: int, width: int) -> tuple[int, int]:
        """Return (height, width) after resizing, before the crop or the padding."""
        if self.fit == "squash":
            return self.size, self.size
        if self.fit == "pad":
            scale = self.size / max(height, width)
            return max(1, round(height * scale)), max(1, round(width * scale))
        short = min(height, width)
        return int(self.size * height / short), int(self.size * width / short)

    def _crop(self, images: torch.Tensor) -> torch.Tensor:
        down, right = ((side - self.size) / 2 for side in images.shape[-2:])
        top, left = (int(down), int(right)) if self.crop_floor else (round(down), round(right))
        return images[..., top : top + self.size, left : left + self.size]


def _to_tensor(image: Image.Image) -> torch.Tensor:

    return transforms().to_dtype(transforms().pil_to_tensor(image), torch.float32, scale=True)[None]


def in_eight_bits(image: Image.Image) -> Image.Image:
    """Return the image with 8 bits a value, scaled from 16; ValueError for 32 bits and floats."""
    if image.mode.startswith("I;16"):
        return Image.fromarray(np.rint(np.asarray(image, dtype=np.float32) / 257).astype(np.uint8))
    if image.mode in ("I", "F"):
        kind = "32-bit numbers" if image.mode == "I" else "floating-point numbers"
        raise ValueError(
            f"is of mode {image.mode}: {kind}, whose black and white are not known: "
            "save it with 8 or 16 bits"
        )
    return image


def opaque(image: Image.Image) -> Image.Image:
    """Return an image as it is seen on white, in RGB."""
    if image.has_transparency_data:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return image.convert("RGB")


def read_image(path: Path) -> Image.Image:
    """Read an image file as rewards take it: RGB of 8 bits a value, transparency on white.

    UserError if it is of none of FORMATS, damaged, too large or too long, or of a range or colours
    that are not known.
    """
    with warnings.catch_warnings(), reading(whole(path)):
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # our own limit is below
        image = Image.open(path, formats=FORMATS)
    with image, reading(path):
        if problem := problem_of_image(*image.size):
            raise UserError(complaint(path, problem))
        image.load()
        try:
            return opaque(in_eight_bits(image))
        except ValueError as error:
            raise UserError(complaint(path, str(error))) from None


def eight_bit(images: Images) -> list[torch.Tensor]:
    """Convert images to [3, H, W] uint8 on the CPU, as files hold them, transparency on white."""
    if isinstance(images, torch.Tensor):
        # one at a time, so that each stays in the processor's cache
        return [image.float().clamp(0, 1).mul_(255).round_().byte().cpu() for image in images]
    return [transforms().pil_to_tensor(opaque(image)) for image in images]


def pil_images(images: Images) -> list[Image.Image]:
    """Convert images [N, 3, H, W] in [0, 1] to PIL's, rounded to 8 bits as diffusers does.

    PIL images become RGB, with transparency on white.
    """
    if not isinstance(images, torch.Tensor):
        return [opaque(image) for image in images]
    return [transforms().to_pil_image(image) for image in eight_bit(images)]


def check_pairs(images: Images, prompts: Sequence[str]) -> None:
    """Check for one prompt per image and at most 8 bits a value; ValueError otherwise.

    UserError for an image that no reward takes (`limits.problem_of_image`).
    """
    if len(images) != len(prompts):
        raise ValueError(
            f"{len(images)} images and {len(prompts)} prompts; need one prompt per image"
        )
    if any(isinstance(image, Image.Image) and image.mode[0] in "IF" for image in images):
        raise ValueError(
            "images have 16 bits or floating-point numbers: call `in_eight_bits` on them first"
        )
    sizes = {
        image.shape[:-3:-1] if isinstance(image, torch.Tensor) else image.size for image in images
    }
    if problem := next(filter(None, (problem_of_image(*size) for size in sizes)), None):
        raise UserError(f"an image {problem}")
