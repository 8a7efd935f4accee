"""Score images by the cosine of a two-tower model: HPS-v2.1, CLIP Score and PickScore.

HPS-v2.1 and CLIP Score leave out the model's logit scale; PickScore has it, over 100, as in the
paper (0.22, not 22).
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

import torch
import torch.nn.functional as F
import transformers
from pydantic import Field

from g2rpo_core.foundation.errors import UserError
from g2rpo_core.foundation.files import complaint, in_one_line
from g2rpo_core.hub.model_store import ModelStore
from g2rpo_core.hub.pretrained import load_whole, only_file, read_weights, with_vocabulary
from g2rpo_core.rewards import packages
from g2rpo_core.rewards.plain_text import control_words, plain
from g2rpo_core.rewards.preprocess import OPENAI_MEAN, OPENAI_STD, Images, Preprocess, check_pairs
from g2rpo_core.rewards.spec import (
    VIT_H_14,
    BackendSettings,
    Reward,
    RewardSpec,
    ScorerSettings,
    Tokens,
)

DEFAULT = ScorerSettings()
MOST_TEXTS = 2**14  # encoded prompts that are kept between calls; 64 MiB with a ViT-H-14


class CosineScore:
    """scale * cosine, [N] float32. Texts are encoded once and kept; nothing has a gradient.

    encode_images: [n, 3, size, size] -> [n, D]; encode_texts: n texts -> [n, D]; both on `device`
    in the dtype of `settings`, of any length. Cosines are taken in float32.
    """

    def __init__(
        self,
        encode_images: Callable[[torch.Tensor], torch.Tensor],
        encode_texts: Callable[[list[str]], torch.Tensor],
        preprocess: Preprocess,
        device: torch.device,
        settings: ScorerSettings,
        scale: float = 1.0,
        tokens: Tokens | None = None,
    ):
        self.encode_images = encode_images
        self.encode_texts = encode_texts
        self.preprocess = preprocess
        self.device, self.scale, self.micro_batch = device, scale, settings.micro_batch
        self.dtype, self.tokens = getattr(torch, settings.dtype), tokens
        self._texts: dict[str, torch.Tensor] = {}

    @torch.no_grad()
    def __call__(self, images: Images, prompts: Sequence[str]) -> torch.Tensor:
        check_pairs(images, prompts)
        new = [prompt for prompt in dict.fromkeys(prompts) if prompt not in self._texts]
        for start in range(0, len(new), self.micro_batch):
            part = new[start : start + self.micro_batch]
            self._texts.update(
                zip(part, map(torch.clone, F.normalize(self.encode_texts(part).float(), dim=-1)))
            )
        texts = torch.stack([self._texts[prompt] for prompt in prompts])
        if len(self._texts) > MOST_TEXTS:
            self._texts.clear()
        parts = (
            images[start : start + self.micro_batch]
            for start in range(0, len(images), self.micro_batch)
        )
        encoded = (
            self.encode_images(self.preprocess(part, self.device).to(self.dtype)) for part in parts
        )
        features = torch.cat([F.normalize(part.float(), dim=-1) for part in encoded])
        return self.scale * (features * texts).sum(1)


def make_open_clip_score(
    model: torch.nn.Module,
    tokenize,
    preprocess: Preprocess,
    device: torch.device,
    settings: ScorerSettings,
) -> CosineScore:
    """Make the cosine score of an open_clip model, which is moved to the device and dtype."""
    model = model.eval().requires_grad_(False).to(device, getattr(torch, settings.dtype))
    words, clean = control_words(tokenize), tokenize.clean_fn

    def encode_texts(texts: list[str]) -> torch.Tensor:
        asked = [plain(text, words, clean) for text in texts]
        return model.encode_text(tokenize(asked).to(device))

    tokens = Tokens(tokenize.context_length, lambda texts: _count_tokens(tokenize, texts))
    return CosineScore(
        model.encode_image, encode_texts, preprocess, device, settings, tokens=tokens
    )


def _open_clip_model(file: Path, name: str, **pretrained: str) -> torch.nn.Module:
    """Make the model with the weights in a file; UserError if they are not the model's.

    open_clip (3.3.0) interpolates positions of other images or texts, and only logs it.
    """
    import open_clip

    model = open_clip.create_model(
        name, precision="fp32", weights_only=True, require_pretrained=True, **pretrained
    )
    own = {key.removeprefix("text."): value.shape for key, value in model.state_dict().items()}
    for key, value in read_weights(file).items():
        key = key.removeprefix("module.").removeprefix("text.")
        if key.endswith("positional_embedding") and own.get(key, value.shape) != value.shape:
            raise UserError(
                f"{file}: {key} is {[*value.shape]}, and its architecture has {[*own[key]]}: "
                "the weights are those of images or texts of another size"
            )
    return model


def _count_tokens(tokenize, texts: Sequence[str]) -> list[int]:
    """Count the tokens of each text before truncation.

    tokenize: open_clip's own tokenizer, or its wrapper of one of transformers.
    """
    if hasattr(tokenize, "encode"):
        return [len(tokenize.encode(text)) + 2 for text in texts]  # its start and end
    return [len(ids) for ids in tokenize.tokenizer(list(texts), verbose=False).input_ids]


class HPSSettings(BackendSettings):
    """Settings of HPS-v2.1."""

    backend: Literal["native", "hpsv2"] = Field(
        "native", description="`native`: our implementation; `hpsv2`: the published package."
    )


def hps(
    folder: Path, device: torch.device, architecture: str, settings: ScorerSettings = DEFAULT
) -> CosineScore:
    """Load HPS-v2.1 from `HPS_v2.1_compressed`, .pt or .safetensors.

    architecture: a name in open_clip, or a file in the folder of the weights.
    """
    import open_clip

    if architecture.endswith(".json"):
        open_clip.add_model_config(folder / architecture)
    name, file = architecture.removesuffix(".json"), only_file(folder, "HPS_v2.1_compressed")
    model = _open_clip_model(file, name, pretrained=str(file))
    preprocess = Preprocess(model.visual.image_size[0], "pad", OPENAI_MEAN, OPENAI_STD)
    return make_open_clip_score(model, open_clip.get_tokenizer(name), preprocess, device, settings)


def _build_hps(models: ModelStore, device: torch.device, settings: HPSSettings) -> Reward:
    if settings.backend == "hpsv2":
        packages.check_installed("hpsv2", "1.2.0", "rewards.hps.backend")
        return packages.as_reward(
            packages.hpsv2(models.folder("hps"), models.entry("hps")["architecture"], device)
        )
    return hps(models.folder("hps"), device, models.entry("hps")["architecture"], settings)


HPS = RewardSpec(
    "hps",
    "HPS-v2.1",
    _build_hps,
    settings=HPSSettings,
    models=("hps",),
    open_clip=("hps",),
    size=VIT_H_14,
    aliases=("hps_v2_1", "hps-v2.1"),
)


def clip_score(
    folder: Path, device: torch.device, settings: ScorerSettings = DEFAULT
) -> CosineScore:
    """Load CLIP Score from a folder like `apple/DFN5B-CLIP-ViT-H-14`.

    It has `open_clip_config.json` and weights. UserError if they have a name that open_clip does
    not look for, because it (3.3.0) goes on with random ones.
    """
    import open_clip
    from open_clip.factory import _find_checkpoint_in_dir

    if not (file := _find_checkpoint_in_dir(folder)):
        there = in_one_line(sorted(each.name for each in folder.iterdir()))
        reason = f"has no weights that open_clip finds, only {there}"
        raise UserError(complaint(folder, reason, "name them open_clip_pytorch_model.bin"))
    name = f"local-dir:{folder}"
    config = json.loads((folder / "open_clip_config.json").read_text())["preprocess_cfg"]
    how = (config.get("resize_mode", "shortest"), config.get("interpolation", "bicubic"))
    fits: dict[tuple[str, str], Literal["squash", "crop"]] = {
        ("squash", "bicubic"): "squash",
        ("shortest", "bicubic"): "crop",
    }
    if how not in fits:
        raise UserError(
            f"{folder}: open_clip_config.json asks for {how[0]}, {how[1]}; "
            "clip_score knows squash and shortest, bicubic"
        )
    model, tokenize = _open_clip_model(Path(file), name), open_clip.get_tokenizer(name)
    if hasattr(tokenize, "tokenizer"):
        with_vocabulary(tokenize, folder)
    preprocess = Preprocess(
        model.visual.image_size[0],
        fits[how],
        tuple(config["mean"]),
        tuple(config["std"]),
    )
    return make_open_clip_score(model, tokenize, preprocess, device, settings)


CLIP_SCORE = RewardSpec(
    "clip_score",
    "CLIP Score",
    lambda models, device, settings: clip_score(models.folder("clip_score"), device, settings),
    models=("clip_score",),
    size=VIT_H_14,
)


def pickscore(
    folder: Path, processor: Path, device: torch.device, settings: ScorerSettings = DEFAULT
) -> CosineScore:
    """Load PickScore from a CLIPModel's folder, laid out like `yuvalkirstain/PickScore_v1`.

    processor: the folder with the tokenizer and `preprocessor_config.json`, as
    `laion/CLIP-ViT-H-14-laion2B-s32B-b79K`'s.
    """
    model = load_whole(transformers.CLIPModel, folder, dtype=torch.float32)
    model.eval().requires_grad_(False)
    # Before rounding: in bfloat16 it would be off by a hundredth
    scale = model.logit_scale.exp().item() / 100
    model.to(device, getattr(torch, settings.dtype))
    tokenizer = with_vocabulary(transformers.AutoTokenizer.from_pretrained(processor), processor)
    config = json.loads((processor / "preprocessor_config.json").read_text())
    length, words = model.config.text_config.max_position_embeddings, control_words(tokenizer)

    def encode_texts(texts: list[str]) -> torch.Tensor:
        tokens = tokenizer(
            [plain(text, words) for text in texts],
            padding=True,
            truncation=True,
            max_length=length,
            return_tensors="pt",
        ).to(device)
        return model.get_text_features(**tokens).pooler_output

    return CosineScore(
        lambda images: model.get_image_features(images).pooler_output,
        encode_texts,
        Preprocess(
            model.config.vision_config.image_size,
            "crop",
            tuple(config["image_mean"]),
            tuple(config["image_std"]),
            crop_floor=True,
        ),
        device,
        settings,
        scale,
        Tokens(
            length,
            lambda texts: [len(ids) for ids in tokenizer(list(texts), verbose=False).input_ids],
        ),
    )


# the size is that of its ViT-H-14
PICKSCORE = RewardSpec(
    "pickscore",
    "PickScore",
    lambda models, device, settings: pickscore(
        models.folder("pickscore"), models.folder("pickscore_processor"), device, settings
    ),
    models=("pickscore", "pickscore_processor"),
    size=VIT_H_14,
)
