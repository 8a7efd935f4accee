"""The exact verifier: which of the attributes that a caption asks for does an image hold?

It has no weights, so it cannot be hacked the way a learned reward can. Every pixel is given to the nearest colour of
the palette; for every object asked for, the stencil (shape, size, position) that best covers the pixels of its
colour is searched exhaustively.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from g2rpo_core.shapes.scenes import BACKGROUND, COLORS, RADII, SHAPES, SIZE, parse_caption, stencil

MIN_IOU = 0.55  # between the pixels of a colour and the best stencil; under it nothing but the colour is recognised
MIN_AREA = 8  # pixels; a colour with fewer is not there
MAX_STRAY = 0.03  # share of the image's pixels that may belong to colours nobody asked for
NEAR = 5.0  # pixels; how far from the named place a centre may lie
_KINDS = [(shape, size) for shape in SHAPES for size in RADII]


def verify(images: torch.Tensor, prompts: Sequence[str]) -> torch.Tensor:
    """Share of asked attributes held, [N] float32 in [0, 1].

    images: [N, 3, 32, 32] float in [0, 1]; prompts: N captions of shape scenes (ValueError otherwise).
    """
    return torch.tensor([sum(held.values()) / len(held) for held in attributes(images, prompts)])


def attributes(images: torch.Tensor, prompts: Sequence[str]) -> list[dict[str, bool]]:
    """For every image, each asked attribute by name and whether the image holds it.

    Objects are asked for colour, shape and size; scenes for their layout and for being clean (no pixels of other
    colours). An attribute of an object that is not recognised counts as not held.
    """
    if images.shape[1:] != (3, SIZE, SIZE) or len(images) != len(prompts):
        raise ValueError(
            f"need one prompt per image [N, 3, {SIZE}, {SIZE}], got {tuple(images.shape)} and {len(prompts)} prompts"
        )
    scenes = [parse_caption(prompt) for prompt in prompts]
    labels = _nearest_color(images.float().cpu())  # [N, H, W], 0 is the background
    colors = list(COLORS)
    asked = [(n, colors.index(thing.color) + 1) for n, scene in enumerate(scenes) for thing in scene.objects]
    masks = torch.stack([labels[n] == color for n, color in asked]).float()
    found = iter(zip(masks.sum((1, 2)).tolist(), _best_stencils(masks)))

    results = []
    for n, scene in enumerate(scenes):
        held, centers = {}, []
        for index, thing in enumerate(scene.objects):
            area, (iou, shape, size, center) = next(found)
            recognised = area >= MIN_AREA and iou >= MIN_IOU
            held[f"color{index}"] = area >= MIN_AREA and area < SIZE * SIZE / 4
            held[f"shape{index}"] = recognised and shape == thing.shape
            held[f"size{index}"] = recognised and size == thing.size
            centers.append(center if recognised else None)
        held["layout"] = all(
            center is not None and abs(center[0] - x) <= NEAR and abs(center[1] - y) <= NEAR
            for center, (x, y) in zip(centers, scene.centers)
        )
        allowed = torch.tensor([0] + [colors.index(thing.color) + 1 for thing in scene.objects])
        held["clean"] = (~torch.isin(labels[n], allowed)).float().mean().item() <= MAX_STRAY
        results.append(held)
    return results


def _nearest_color(images: torch.Tensor) -> torch.Tensor:
    """[N, 3, H, W] in [0, 1] -> palette index [N, H, W]: 0 background, then COLORS in order.

    Anti-aliased edges between an object and the background may lie nearest to a third colour, so a pixel that is
    not close to any palette entry takes the label that most of its 3x3 neighbourhood has.
    """
    palette = torch.tensor([BACKGROUND, *COLORS.values()]).float() / 255
    distance = (images[:, :, None] - palette.T[None, :, :, None, None]).square().sum(1).sqrt()  # [N, palette, H, W]
    nearest, labels = distance.min(1)
    sure = F.one_hot(labels, len(palette)).permute(0, 3, 1, 2).float() * (nearest < 0.25)[:, None]
    votes = F.avg_pool2d(F.pad(sure, (1, 1, 1, 1)), 3, stride=1)
    return torch.where((nearest < 0.25) | (votes.sum(1) == 0), labels, votes.argmax(1))


def _best_stencils(masks: torch.Tensor) -> list[tuple[float, str, str, tuple[int, int]]]:
    """For every mask [H, W]: the largest intersection over union with any stencil, its shape, size and centre (x, y)."""
    stencils = torch.stack([torch.from_numpy(stencil(shape, size) > 0.5).float() for shape, size in _KINDS])
    kernels = stencils[:, None, SIZE // 2 - 8 : SIZE // 2 + 8, SIZE // 2 - 8 : SIZE // 2 + 8]
    overlap = F.conv2d(masks[:, None], kernels, padding=8)  # [N, kinds, H + 1, W + 1]; index (y, x) is the centre
    union = masks.sum((1, 2))[:, None, None, None] + stencils.sum((1, 2))[None, :, None, None] - overlap
    iou, index = (overlap / union).flatten(1).max(1)
    kinds, y, x = torch.unravel_index(index, overlap.shape[1:])
    return [(value, *_KINDS[k], (cx, cy)) for value, k, cx, cy in zip(iou.tolist(), kinds.tolist(), x.tolist(), y.tolist())]
