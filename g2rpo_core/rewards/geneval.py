"""Score whether an image shows the objects, numbers, colours and positions that GenEval asks for.

arXiv 2310.11513. An object detector finds objects, and CLIP names their colours, as published: of
ten colours the one whose texts are nearest to the object on grey. The detector is transformers'
Mask2Former, of GenEval's own family, or any that finds boxes; GenEval's is mmdet's. What is asked
is read from the prompt alone. See `geneval_rule` for the rule.
"""

import math
from collections.abc import Collection, Sequence
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
import transformers
from PIL import Image
from pydantic import Field

from g2rpo_core.foundation.errors import UserError, attempt
from g2rpo_core.foundation.settings import Count
from g2rpo_core.hub.pretrained import load_whole, with_vocabulary
from g2rpo_core.rewards import geneval_rule as rule
from g2rpo_core.rewards.preprocess import (
    OPENAI_MEAN,
    OPENAI_STD,
    Images,
    Preprocess,
    check_pairs,
    eight_bit,
)
from g2rpo_core.rewards.spec import ModelSize, RewardSettings, RewardSpec, RewardWithReasons

MASKS = ("mask2former", "maskformer")  # types of models that find masks; others find boxes
QUERIES = 100  # objects that a detector of masks finds at most in an image, as published
GREY = 0x99  # what of an object's box is not the object, as published
TEXTS = (
    "a photo of a {color} {name}",
    "a photo of a {color}-colored {name}",
    "a photo of a {color} object",
)


class GenEvalSettings(RewardSettings):
    """Settings of the verifier of GenEval's prompts; the thresholds are as published."""

    partial: bool = Field(
        True,
        description=(
            "Score the share of the prompt's requirements that are met, as Flow-GRPO trains on; "
            "false: 1 if all are met, else 0, as in GenEval."
        ),
    )
    threshold: float = Field(0.3, ge=0, le=1, description="Detections above this confidence count.")
    counting_threshold: float = Field(
        0.9, ge=0, le=1, description="The same threshold for prompts that name a number."
    )
    max_objects: Count = Field(
        16, description="Most detections per class that count, by confidence."
    )
    max_overlap: float = Field(
        1.0,
        gt=0,
        le=1,
        description=(
            "Intersection over union above which only the more confident of two detections counts; "
            "1: both do."
        ),
    )
    position_margin: float = Field(
        0.1,
        ge=0,
        le=1,
        description="Share of both objects' sizes by which centres must differ for a position.",
    )
    shortest_edge: Count | None = Field(
        800,
        description=(
            "Pixels of an image's shorter side for the detector, as published; null: "
            "as its folder says."
        ),
    )
    micro_batch: Count = Field(8, description="Images per call of the detector.")


DEFAULT = GenEvalSettings()


class Query(NamedTuple):
    """What is searched for in an image."""

    names: Collection[str]
    threshold: float


class Detector:
    """detector(images, queries) -> for each image its objects by class, not sorted.

    images: [N, 3, H, W] uint8; found are objects of the classes named whose score is above the
    query's threshold.
    """

    def __init__(
        self, folder: Path, device: torch.device, shortest_edge: int | None = DEFAULT.shortest_edge
    ):

        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
        self.masks = config.model_type in MASKS
        if (
            not self.masks
            and type(config) not in transformers.AutoModelForObjectDetection._model_mapping
        ):
            raise UserError(
                f"{folder}: is a model of type {config.model_type!r}, which detects no objects: "
                "use a Mask2Former of COCO's instances, "
                "or a detector such as DETR"
            )
        kind = (
            transformers.AutoModelForUniversalSegmentation
            if self.masks
            else transformers.AutoModelForObjectDetection
        )
        self.model = load_whole(kind, folder, dtype=torch.float32, local_files_only=True)
        self.model.eval().requires_grad_(False).to(device)
        self.processor = transformers.AutoImageProcessor.from_pretrained(
            folder, local_files_only=True
        )
        # 1333 pixels at most beside 800, as published
        edges = shortest_edge and {
            "shortest_edge": shortest_edge,
            "longest_edge": shortest_edge * 5 // 3,
        }
        self.size = {"size": edges} if edges else {}
        self.names = {label: rule.class_name(name) for label, name in config.id2label.items()}

    @torch.no_grad()
    def __call__(
        self, images: torch.Tensor, queries: Sequence[Query]
    ) -> list[dict[str, list[rule.Found]]]:
        inputs = self.processor(images=list(images), return_tensors="pt", **self.size).to(
            self.model.device
        )
        outputs = self.model(**inputs)
        shape = (images.shape[-2], images.shape[-1])
        read = self._instances if self.masks else self._boxes
        return [read(outputs, row, query, shape) for row, query in enumerate(queries)]

    def _boxes(
        self, outputs, row: int, query: Query, shape: tuple[int, int]
    ) -> dict[str, list[rule.Found]]:
        """Read a detector's boxes, cut to the image."""
        one = type(outputs)(
            logits=outputs.logits[row : row + 1], pred_boxes=outputs.pred_boxes[row : row + 1]
        )
        (read,) = self.processor.post_process_object_detection(
            one, query.threshold, target_sizes=[shape]
        )
        edge = read["boxes"].new_tensor(shape).flip(0).repeat(2)
        found: dict[str, list[rule.Found]] = {}
        for score, label, box in zip(
            *(
                part.tolist()
                for part in (read["scores"], read["labels"], read["boxes"].clamp(min=0).min(edge))
            )
        ):
            if self.names.get(label) in query.names:
                found.setdefault(self.names[label], []).append(rule.Found(score, tuple(box)))
        return found

    def _instances(
        self, outputs, row: int, query: Query, shape: tuple[int, int]
    ) -> dict[str, list[rule.Found]]:
        """Read masks as mmdet does: score = class probability x the mask's mean probability.

        Boxes are those of the masks. A mask is enlarged to the image before it is cut at 0, here in
        one step; transformers' own function cuts it at 384 x 384.
        """
        # Queries and classes that could be above the threshold: a mask's mean is at most 1
        probabilities = outputs.class_queries_logits[row].float().softmax(-1)[:, :-1]
        scores, places = probabilities.flatten().topk(min(QUERIES, probabilities.numel()))
        found: dict[str, list[rule.Found]] = {}
        for score, place in zip(scores.tolist(), places.tolist()):
            query_row, label = divmod(place, probabilities.shape[1])
            if score <= query.threshold or self.names[label] not in query.names:
                continue
            # The object's mask, box and score
            logits = outputs.masks_queries_logits[row, query_row].float()[None, None]
            logits = F.interpolate(logits, size=shape, mode="bilinear", align_corners=False)[0, 0]
            mask = logits > 0
            if not mask.any():
                continue
            score *= logits[mask].sigmoid().mean().item()
            rows, columns = (mask.any(axis).nonzero().flatten().tolist() for axis in (1, 0))
            box = (float(columns[0]), float(rows[0]), columns[-1] + 1.0, rows[-1] + 1.0)
            if score > query.threshold:
                found.setdefault(self.names[label], []).append(
                    rule.Found(score, box, mask.cpu().numpy())
                )
        return found


class Colors:
    """colors(image, objects, name) -> the colour of each object: a CLIP's nearest of ten.

    image: [3, H, W] uint8; objects are of the class `name`. A class's texts are encoded once.
    """

    def __init__(self, folder: Path, device: torch.device):

        self.model = load_whole(
            transformers.CLIPModel, folder, dtype=torch.float32, local_files_only=True
        )
        self.model.eval().requires_grad_(False).to(device)
        self.tokenizer = with_vocabulary(
            transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True), folder
        )
        size = self.model.config.vision_config.image_size
        self.preprocess = Preprocess(size, "crop", OPENAI_MEAN, OPENAI_STD)
        self.device = device
        self._texts: dict[str, torch.Tensor] = {}

    @torch.no_grad()
    def __call__(self, image: torch.Tensor, objects: Sequence[rule.Found], name: str) -> list[str]:
        if name not in self._texts:
            self._texts[name] = self._encode(name)
        crops = [cut_out(image, one) for one in objects]
        features = self.model.get_image_features(self.preprocess(crops, self.device)).pooler_output
        return [rule.COLORS[index] for index in (features @ self._texts[name].T).argmax(1).tolist()]

    def _encode(self, name: str) -> torch.Tensor:
        """Return the mean direction [10, D] of each colour's texts."""
        texts = [text.format(color=color, name=name) for color in rule.COLORS for text in TEXTS]
        tokens = self.tokenizer(texts, padding=True, return_tensors="pt").to(self.device)
        features = F.normalize(self.model.get_text_features(**tokens).pooler_output, dim=-1)
        return F.normalize(features.view(len(rule.COLORS), len(TEXTS), -1).mean(1), dim=-1)


def cut_out(image: torch.Tensor, one: rule.Found) -> Image.Image:
    """Cut the object's box, at least a pixel, from an image [3, H, W] uint8; grey around it."""
    pixels = image.permute(1, 2, 0).numpy()
    if one.mask is not None:
        pixels = np.where(one.mask[..., None], pixels, np.uint8(GREY))
    left, top, right, bottom = map(round, one.box)
    left, top = min(left, pixels.shape[1] - 1), min(top, pixels.shape[0] - 1)
    return Image.fromarray(pixels[top : max(bottom, top + 1), left : max(right, left + 1)])


class GenEval(RewardWithReasons):
    """score(images, prompts) -> [N] float32, at most 1, NaN for a prompt that is not GenEval's.

    Images are rounded to 8 bits. Whole images: 0 or 1; with `partial`, shares of what is asked,
    below 0 with far too many objects (see `geneval_rule.share`).
    """

    def __init__(self, detector: Detector, colors: Colors, settings: GenEvalSettings = DEFAULT):
        self.detector, self.colors, self.settings = detector, colors, settings

    def score_with_reasons(
        self, images: Images, prompts: Sequence[str]
    ) -> tuple[torch.Tensor, list[str | None]]:
        """Return scores [N], and for each NaN why the detector cannot judge the prompt."""
        check_pairs(images, prompts)
        scores = torch.full((len(prompts),), math.nan)
        reasons = [problem_of_prompt(each, self.classes) for each in prompts]
        pixels = eight_bit(images)
        judged = [row for row, reason in enumerate(reasons) if reason is None]
        for _, same in groupby(judged, lambda row: pixels[row].shape):
            rows = list(same)
            for start in range(0, len(rows), self.settings.micro_batch):
                part = rows[start : start + self.settings.micro_batch]
                scores[part] = torch.tensor(
                    self._judge(
                        torch.stack([pixels[row] for row in part]), [prompts[row] for row in part]
                    )
                )
        return scores, reasons

    @property
    def classes(self) -> set[str]:
        """Return the classes that the detector knows."""
        return set(self.detector.names.values())

    def _judge(self, images: torch.Tensor, prompts: Sequence[str]) -> list[float]:
        settings = self.settings
        asked = [rule.parse(prompt, self.classes) for prompt in prompts]
        queries = [
            Query(
                [thing.name for thing in each.things],
                settings.counting_threshold if each.counting else settings.threshold,
            )
            for each in asked
        ]
        judge = rule.share if settings.partial else rule.fulfils
        scores = []
        for image, each, query, found in zip(
            images, asked, queries, self.detector(images, queries)
        ):
            objects = {
                name: rule.keep(these, query.threshold, settings.max_objects, settings.max_overlap)
                for name, these in found.items()
            }
            colors_of = lambda these, name, image=image: self.colors(image, these, name)
            scores.append(float(judge(each, objects, colors_of, settings.position_margin)))
        return scores


def problem_of_prompt(prompt: str, classes: Collection[str] | None = None) -> str | None:
    """Say why no image of a prompt can have a score; None if it can.

    classes: the detector's; None: not known yet.
    """
    return next(iter(attempt(lambda: rule.parse(prompt, classes), ValueError)[1]), None)


def geneval(
    folder: Path, clip: Path, device: torch.device, settings: GenEvalSettings = DEFAULT
) -> GenEval:
    """Load the verifier from a detector's folder and a CLIPModel's with its tokenizer.

    Laid out like `facebook/mask2former-swin-small-coco-instance` and
    `openai/clip-vit-large-patch14`.
    """
    return GenEval(Detector(folder, device, settings.shortest_edge), Colors(clip, device), settings)


# Mask2Former with Swin-S (68.7 M parameters; for an image of 800 x 800, 442 GFLOP counted and 695
# MiB of float32 states measured on a processor) and CLIP ViT-L/14 (427.6 M; 162 GFLOP an object,
# two at most)
SIZE = ModelSize(
    68_741_083 + 427_616_513, 695 * 2**20, 0.442e12 + 2 * 0.162e12, at_once=DEFAULT.micro_batch
)

SPEC = RewardSpec(
    "geneval",
    "GenEval",
    lambda models, device, settings: geneval(
        models.folder("geneval"), models.folder("geneval_clip"), device, settings
    ),
    settings=GenEvalSettings,
    models=("geneval", "geneval_clip"),
    problem_of_prompt=problem_of_prompt,
    size=SIZE,
)
