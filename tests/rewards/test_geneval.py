"""GenEval's verifier with small detectors and a CLIP of the published classes."""

import json
import shutil

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms.v2 import functional as TF
from transformers import (
    AutoTokenizer,
    CLIPModel,
    Mask2FormerConfig,
    Mask2FormerForUniversalSegmentation,
    Mask2FormerImageProcessor,
    SwinConfig,
)

from g2rpo_core.rewards import geneval, registry
from g2rpo_core.rewards.geneval import Colors, Detector, GenEvalSettings, Query, cut_out
from g2rpo_core.rewards.geneval_rule import COLORS, Found
from tests.fixtures.errors import refused
from tests.fixtures.images import photograph

CPU = torch.device("cpu")
LABELS = ["cat", "mouse", "traffic light"]  # as COCO's; GenEval's are computer mice
SETTINGS = {"shortest_edge": 64, "micro_batch": 2}


@pytest.fixture(scope="module")
def masks(tmp_path_factory):
    """A Mask2Former of random weights, laid out as facebook/mask2former-swin-small-coco-..."""
    torch.manual_seed(0)
    swin = SwinConfig(
        image_size=32,
        patch_size=4,
        embed_dim=8,
        depths=[1, 1, 1, 1],
        num_heads=[1, 1, 2, 2],
        window_size=4,
        out_features=["stage1", "stage2", "stage3", "stage4"],
    )
    config = Mask2FormerConfig(
        backbone_config=swin,
        feature_size=32,
        mask_feature_size=32,
        hidden_dim=32,
        encoder_layers=1,
        decoder_layers=2,
        num_attention_heads=2,
        encoder_feedforward_dim=16,
        dim_feedforward=16,
        num_queries=12,
        id2label=dict(enumerate(LABELS)),
    )
    folder = tmp_path_factory.mktemp("mask2former")
    Mask2FormerForUniversalSegmentation(config).save_pretrained(folder)
    Mask2FormerImageProcessor(size={"height": 64, "width": 64}).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def clip(models, tmp_path_factory):
    """The small CLIPModel of PickScore, laid out as openai/clip-vit-large-patch14."""
    folder = tmp_path_factory.mktemp("clip")
    for part in ("pickscore_processor", "pickscore"):
        shutil.copytree(models / part, folder, dirs_exist_ok=True)
    return folder


def eight(*images: Image.Image) -> torch.Tensor:
    return torch.stack([TF.pil_to_tensor(image) for image in images])


def test_masks_are_read_as_mmdet_reads_them(masks):
    """Recomputed plainly from the model's outputs: every query and class."""
    detector = Detector(masks, CPU, 64)
    images = eight(photograph(80, 96, 1))
    inputs = detector.processor(images=list(images), return_tensors="pt", **detector.size)
    assert inputs["pixel_values"].shape == (1, 3, 96, 64)  # 64 x 76.8, in steps of 32
    outputs = detector.model(**inputs)
    probabilities = outputs.class_queries_logits[0].softmax(-1)[:, :-1]
    logits = torch.nn.functional.interpolate(
        outputs.masks_queries_logits, size=(96, 80), mode="bilinear"
    )[0]
    best = sorted(
        ((probabilities[q, c].item(), q, c) for q in range(12) for c in range(3)), reverse=True
    )[: geneval.QUERIES]
    expected = {}
    for probability, query, label in best:
        mask = logits[query] > 0
        if mask.any():
            rows, columns = np.nonzero(mask.numpy())
            score = probability * logits[query].sigmoid()[mask].mean().item()
            box = (columns.min(), rows.min(), columns.max() + 1, rows.max() + 1)
            expected.setdefault(detector.names[label], []).append((score, box, mask.numpy()))
    (found,) = detector(images, [Query(detector.names.values(), 0.0)])
    assert found.keys() == expected.keys() and len(expected) == 3
    for name, objects in found.items():
        for one, (score, box, mask) in zip(objects, expected[name], strict=True):
            assert (
                one.score == pytest.approx(score, abs=1e-5)
                and one.box == box
                and (one.mask == mask).all()
            )


def test_a_model_that_detects_nothing_is_refused_in_one_line(clip):
    with refused("of type 'clip', which detects no objects: use a Mask2Former of COCO's instances"):
        Detector(clip, CPU)


def test_an_object_is_cut_out_on_grey():
    image = eight(photograph(8, 6, 0))[0]
    mask = np.zeros((6, 8), bool)
    mask[2:4, 3:7] = True
    mask[3, 3] = False
    crop = np.asarray(cut_out(image, Found(1.0, (3.0, 2.0, 7.0, 4.0), mask)))
    assert crop.shape == (2, 4, 3) and (crop[1, 0] == 0x99).all()
    assert (crop[0] == image[:, 2, 3:7].T.numpy()).all()


def test_the_colour_is_the_nearest_of_ten_as_published(clip):
    """By transformers' CLIPModel: the mean direction of three texts of each colour."""
    image, objects = (
        eight(photograph(64, 64, 5))[0],
        [Found(1.0, (4.0, 4.0, 36.0, 36.0)), Found(1.0, (30.0, 30.0, 62.0, 62.0))],
    )
    model, tokenizer = CLIPModel.from_pretrained(clip).eval(), AutoTokenizer.from_pretrained(clip)
    colors = Colors(clip, CPU)
    pixels = torch.cat([colors.preprocess([cut_out(image, one)], CPU) for one in objects])
    expected = []
    for row in torch.nn.functional.normalize(
        model.get_image_features(pixels).pooler_output, dim=-1
    ):
        cosines = []
        for color in COLORS:
            texts = [
                f"a photo of a {color} cat",
                f"a photo of a {color}-colored cat",
                f"a photo of a {color} object",
            ]
            one = [
                model.get_text_features(**tokenizer(text, return_tensors="pt")).pooler_output[0]
                for text in texts
            ]
            mean = torch.stack([part / part.norm() for part in one]).mean(0)
            cosines.append((row @ mean / mean.norm()).item())
        expected.append(COLORS[int(np.argmax(cosines))])
    assert colors(image, objects, "cat") == expected


def test_the_registry_loads_both_models_and_settings_decide_the_rule(tmp_path, masks, clip):
    for name, folder in (("geneval", masks), ("geneval_clip", clip)):
        (tmp_path / name).symlink_to(folder)
    lock = {name: {"folder": name, "files": {}} for name in ("geneval", "geneval_clip")}
    (tmp_path / "models.lock.json").write_text(json.dumps(lock))
    images, prompts = (
        [photograph(64, 64, 2)] * 2,
        ["a photo of a cat", "a photo of two computer mouses"],
    )
    scores = {}
    for partial in (True, False):
        section = {
            "geneval": {
                **SETTINGS,
                "partial": partial,
                "threshold": 0.0,
                "counting_threshold": 0.0,
                "max_objects": 3,
            }
        }
        scores[partial] = registry.load(["geneval"], tmp_path, section=section)["geneval"](
            images, prompts
        ).tolist()
    # Random weights find everything: three cats instead of one, three mice instead of two
    assert scores == {True: [-1.0, 0.5], False: [1.0, 0.0]}


def test_a_batch_of_any_sizes_equals_each_image_alone(masks, clip):
    reward = geneval.geneval(masks, clip, CPU, GenEvalSettings(**SETTINGS, threshold=0.14))
    images = [
        photograph(64, 64, 0),
        photograph(64, 64, 1),
        photograph(80, 64, 2),
        photograph(64, 64, 3),
        photograph(64, 96, 4),
    ]
    prompts = [
        "a photo of a cat",
        "a photo of a red cat",
        "a photo of a cat above a computer mouse",
        "a photo of a traffic light",
        "x",
    ]
    together, alone = (
        reward(images, prompts),
        [reward([image], [prompt]).item() for image, prompt in zip(images, prompts)],
    )
    assert together.dtype == torch.float32 and together[:4].std() > 0
    assert together.tolist() == pytest.approx(alone, nan_ok=True)
