"""GenEval's verifier with a detector that was trained on the images of task shapes."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers import YolosConfig, YolosForObjectDetection, YolosImageProcessor

from g2rpo_core.rewards.geneval import Detector, GenEval, GenEvalSettings, Query
from g2rpo_core.tasks.drawing import COLORS, SHAPES, nearest_color
from g2rpo_core.tasks.shapes import Shapes, ShapesScene

pytestmark = pytest.mark.slow
STEPS, BATCH, RATE = 800, 32, 2e-3  # 15 seconds of a processor


def scenes_of(count: int, seed: int, *, testing: bool) -> tuple[list[ShapesScene], torch.Tensor]:
    """Scenes whose shapes all differ, and their images [N, 3, 32, 32]."""
    scenes, images = Shapes().sample(count, seed, testing=testing)
    kept = [
        row
        for row, scene in enumerate(scenes)
        if len({thing.shape for thing in scene.objects}) == len(scene.objects)
    ]
    return [scenes[row] for row in kept], torch.from_numpy(np.asarray(images, dtype=np.float32))[
        kept
    ]


def boxes_of(scenes: list[ShapesScene], images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Labels [N, 4] of the shapes, 4 for an absent one, and boxes [N, 4, 4] in [0, 1].

    A box is its centre, width and height.
    """
    pixels = nearest_color(images)
    labels, boxes = (
        torch.full((len(scenes), len(SHAPES)), len(SHAPES)),
        torch.zeros(len(scenes), len(SHAPES), 4),
    )
    for row, scene in enumerate(scenes):
        for thing in scene.objects:
            mask = pixels[row] == list(COLORS).index(thing.color) + 1
            rows, columns = (mask.any(axis).nonzero().flatten() for axis in (1, 0))
            ends = (
                torch.stack([columns[0], rows[0], columns[-1] + 1, rows[-1] + 1]) / images.shape[-1]
            )
            shape = SHAPES.index(thing.shape)
            labels[row, shape] = shape
            boxes[row, shape] = torch.cat([(ends[:2] + ends[2:]) / 2, ends[2:] - ends[:2]])
    return labels, boxes


@pytest.fixture(scope="module")
def detector(tmp_path_factory) -> Detector:
    """A small YOLOS, each of whose detection tokens learns one shape; saved and loaded again."""
    torch.manual_seed(0)
    scenes, images = scenes_of(9000, 0, testing=False)
    labels, boxes = boxes_of(scenes, images)
    config = YolosConfig(
        hidden_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=128,
        image_size=[32, 32],
        patch_size=8,
        num_detection_tokens=4,
        id2label=dict(enumerate(SHAPES)),
        use_mid_position_embeddings=False,
        initializer_range=0.1,
    )
    model = YolosForObjectDetection(config).train()
    for start in (model.vit.embeddings.position_embeddings, model.vit.embeddings.detection_tokens):
        torch.nn.init.normal_(
            start, std=0.5
        )  # they begin at zero, which so short a training hardly leaves
    optimizer = torch.optim.AdamW(model.parameters(), RATE)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, STEPS)
    draw = torch.Generator().manual_seed(0)
    for _ in range(STEPS):
        rows = torch.randint(len(images), (BATCH,), generator=draw)
        made = model(images[rows] * 2 - 1)
        there = labels[rows] < len(SHAPES)
        loss = F.cross_entropy(made.logits.flatten(0, 1), labels[rows].flatten())
        loss = loss + 5 * (made.pred_boxes - boxes[rows])[there].abs().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    folder = tmp_path_factory.mktemp("yolos")
    model.save_pretrained(folder)
    YolosImageProcessor(
        image_mean=[0.5] * 3, image_std=[0.5] * 3, size={"height": 32, "width": 32}
    ).save_pretrained(folder)
    return Detector(folder, torch.device("cpu"), 32)


def no_colors(*_) -> list[str]:
    raise AssertionError("no prompt here asks for a colour")


def test_right_prompts_hold_and_wrong_ones_do_not(detector):
    """Of images whose captions the detector has not seen, by GenEval's rule."""
    scenes, images = scenes_of(400, 1, testing=True)
    verify = GenEval(
        detector,
        no_colors,
        GenEvalSettings(shortest_edge=32, partial=False, micro_batch=64, counting_threshold=0.5),
    )
    opposite = {"left of": "right of", "right of": "left of", "above": "below", "below": "above"}
    right, wrong, pairs = (
        [],
        [],
        [row for row, scene in enumerate(scenes) if len(scene.objects) == 2],
    )
    for scene in scenes:
        names = [thing.shape for thing in scene.objects]
        other = next(shape for shape in SHAPES if shape not in names)
        right.append(f"a photo of a {names[0]}")
        wrong.append(f"a photo of a {other}")
    held, not_held = verify(images, right), verify(images, wrong)
    assert len(scenes) > 300 and held.mean() > 0.95 and not_held.mean() < 0.05
    # Two objects, and their positions
    two = [
        (scenes[row].objects[0].shape, scenes[row].layout, scenes[row].objects[1].shape)
        for row in pairs
    ]
    assert verify(images[pairs], [f"a photo of a {a} and a {b}" for a, _, b in two]).mean() > 0.95
    assert (
        verify(images[pairs], [f"a photo of a {a} {layout} a {b}" for a, layout, b in two]).mean()
        > 0.9
    )
    assert (
        verify(
            images[pairs], [f"a photo of a {a} {opposite[layout]} a {b}" for a, layout, b in two]
        ).mean()
        < 0.05
    )
    # There is only one of each
    assert (
        verify(images, [f"a photo of two {scene.objects[0].shape}s" for scene in scenes]).mean()
        < 0.05
    )


def test_boxes_are_those_of_the_objects_in_pixels(detector):
    """Of images enlarged to 64 pixels: within two pixels on average, and never out of the image."""
    scenes, images = scenes_of(100, 2, testing=True)
    large = images.repeat_interleave(2, 2).repeat_interleave(2, 3).mul(255).round().byte()
    _, boxes = boxes_of(scenes, images)
    off = []
    for row, found in enumerate(detector(large, [Query(SHAPES, 0.3)] * len(large))):
        for shape, (one,) in found.items():
            x, y, width, height = (64 * boxes[row, SHAPES.index(shape)]).tolist()
            off += [abs(one.box[0] - x + width / 2), abs(one.box[3] - y - height / 2)]
            assert min(one.box) >= 0 and max(one.box) <= 64
    assert len(off) > 200 and np.mean(off) < 2
