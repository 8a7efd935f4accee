"""Score images by ImageReward: BLIP's image and text towers, and a head on the text's first token.

The text attends to the image. The towers are transformers' own. `ImageReward.pt` names its weights
as in BLIP's first code, so the keys are renamed.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import torch
import transformers
from pydantic import Field
from torch import nn

from g2rpo_core.hub.model_store import ModelStore
from g2rpo_core.hub.pretrained import only_file, read_weights, renamed, with_vocabulary
from g2rpo_core.rewards import packages
from g2rpo_core.rewards.plain_text import control_words, plain
from g2rpo_core.rewards.preprocess import OPENAI_MEAN, OPENAI_STD, Images, Preprocess, check_pairs
from g2rpo_core.rewards.spec import (
    BackendSettings,
    ModelSize,
    Reward,
    RewardSpec,
    ScorerSettings,
    Tokens,
)

MEAN, STD = 0.16717362830052426, 1.0333394966054072  # of the raw scores, in the published code
TEXT_LENGTH = 35  # tokens; longer prompts are cut
DEFAULT = ScorerSettings(micro_batch=64)
RENAMED = [  # in this order; the text tower's names are those of transformers already
    (r"^blip\.visual_encoder\.cls_token$", "vision.embeddings.class_embedding"),
    (r"^blip\.visual_encoder\.pos_embed$", "vision.embeddings.position_embedding"),
    (r"^blip\.visual_encoder\.patch_embed\.proj\.", "vision.embeddings.patch_embedding."),
    (r"^blip\.visual_encoder\.norm\.", "vision.post_layernorm."),
    (
        r"^blip\.visual_encoder\.blocks\.(\d+)\.norm([12])\.",
        r"vision.encoder.layers.\1.layer_norm\2.",
    ),
    (
        r"^blip\.visual_encoder\.blocks\.(\d+)\.attn\.qkv\.",
        r"vision.encoder.layers.\1.self_attn.qkv.",
    ),
    (
        r"^blip\.visual_encoder\.blocks\.(\d+)\.attn\.proj\.",
        r"vision.encoder.layers.\1.self_attn.projection.",
    ),
    (r"^blip\.visual_encoder\.blocks\.(\d+)\.mlp\.", r"vision.encoder.layers.\1.mlp."),
    (r"^blip\.text_encoder\.", "text."),
    (r"^mlp\.layers\.", "head."),
]
MED_CONFIG = (  # what of med_config.json the text tower's shape is
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "max_position_embeddings",
    "hidden_act",
    "layer_norm_eps",
    "pad_token_id",
)
# weights of BLIP's training, and a constant
UNUSED = ("blip.vision_proj.", "blip.text_proj.", "blip.text_encoder.embeddings.position_ids")


class ImageRewardSettings(BackendSettings):
    """Settings of ImageReward."""

    backend: Literal["native", "image-reward"] = Field(
        "native", description="`native`: our implementation; `image-reward`: the published package."
    )


class ImageRewardModel(nn.Module):
    """images [N, 3, size, size] normalized, tokens [N, L] and their mask -> raw scores [N] float32.

    The head is linear throughout, as published: the activations are commented out there, and
    dropout only acts in training. It stays float32 whatever the dtype of the towers.
    """

    def __init__(self, vision: transformers.BlipVisionConfig, text: transformers.BlipTextConfig):

        super().__init__()
        self.vision = transformers.BlipVisionModel(vision)
        self.text = transformers.BlipTextModel(text, add_pooling_layer=False)
        sizes = (text.hidden_size, 1024, 128, 64, 16, 1)
        drops = (0.2, 0.2, 0.1)
        layers = [
            [nn.Linear(*pair), *map(nn.Dropout, drops[n : n + 1])]
            for n, pair in enumerate(zip(sizes, sizes[1:]))
        ]
        self.head = nn.Sequential(*(layer for group in layers for layer in group))

    def forward(
        self, images: torch.Tensor, tokens: torch.Tensor, mask: torch.Tensor
    ) -> torch.Tensor:
        states = self.text(
            tokens,
            attention_mask=mask,
            encoder_hidden_states=self.vision(images).last_hidden_state,
            is_decoder=False,
        ).last_hidden_state
        return self.head(states[:, 0].float()).squeeze(1)


def from_checkpoint(weights: dict[str, torch.Tensor], med_config: dict) -> ImageRewardModel:
    """Build the model of `ImageReward.pt`.

    Its sizes come from the weights, or from `med_config.json` if the text's weights do not show
    them. Raise RuntimeError, naming the weights, if they are not exactly those of the model.
    """
    named = renamed(weights, RENAMED, UNUSED)
    # The sizes of both towers
    tower = packages.image_tower(weights)
    vision = transformers.BlipVisionConfig(
        hidden_size=tower["embed_dim"],
        intermediate_size=named["vision.encoder.layers.0.mlp.fc1.weight"].shape[0],
        num_hidden_layers=tower["depth"],
        num_attention_heads=tower["num_heads"],
        image_size=tower["img_size"],
        patch_size=tower["patch_size"],
        hidden_act="gelu",
        layer_norm_eps=1e-6,
    )
    text = transformers.BlipTextConfig(
        **{key: med_config[key] for key in MED_CONFIG},
        encoder_hidden_size=tower["embed_dim"],
        is_decoder=True,
    )
    model = ImageRewardModel(vision, text)
    model.load_state_dict({name: value.float() for name, value in named.items()})
    return model


class ImageReward:
    """(raw score - MEAN) / STD, [N] float32: about N(0, 1) over the published images.

    Nothing has a gradient. An image is encoded once per prompt, a prompt is tokenized once. Unlike
    with CLIP scores, the text cannot be encoded without its image, because it attends to the image
    in every layer.
    """

    def __init__(
        self,
        model: ImageRewardModel,
        tokenizer,
        device: torch.device,
        settings: ScorerSettings = DEFAULT,
    ):

        self.dtype = getattr(torch, settings.dtype)
        self.model = model.eval().requires_grad_(False).to(device, self.dtype)
        self.model.head.float()
        self.tokenizer, self.device, self.micro_batch = tokenizer, device, settings.micro_batch
        self.words = control_words(tokenizer)
        self.tokens = Tokens(
            TEXT_LENGTH,
            lambda texts: [len(ids) for ids in tokenizer(list(texts), verbose=False).input_ids],
        )
        size = model.vision.config.image_size
        self.preprocess = Preprocess(size, "crop", OPENAI_MEAN, OPENAI_STD)

    @torch.no_grad()
    def __call__(self, images: Images, prompts: Sequence[str]) -> torch.Tensor:
        check_pairs(images, prompts)
        different = {prompt: row for row, prompt in enumerate(dict.fromkeys(prompts))}
        encoded = self.tokenizer(
            [plain(prompt, self.words) for prompt in different],
            padding=True,
            truncation=True,
            max_length=TEXT_LENGTH,
            return_tensors="pt",
        )
        rows = torch.tensor([different[prompt] for prompt in prompts])
        tokens, mask = (
            part[rows].to(self.device) for part in (encoded.input_ids, encoded.attention_mask)
        )
        scores = [
            self.model(
                self.preprocess(images[part], self.device).to(self.dtype), tokens[part], mask[part]
            )
            for part in (
                slice(start, start + self.micro_batch)
                for start in range(0, len(images), self.micro_batch)
            )
        ]
        return (torch.cat(scores) - MEAN) / STD


def image_reward(
    folder: Path, tokenizer: Path, device: torch.device, settings: ScorerSettings = DEFAULT
) -> ImageReward:
    """Load ImageReward from a folder like `THUDM/ImageReward`.

    It has `ImageReward` (.pt or .safetensors) and `med_config.json`. tokenizer: the folder of
    `bert-base-uncased`'s.
    """
    model = from_checkpoint(
        read_weights(only_file(folder, "ImageReward")),
        json.loads((folder / "med_config.json").read_text()),
    )
    words = with_vocabulary(transformers.AutoTokenizer.from_pretrained(tokenizer), tokenizer)
    return ImageReward(model, words, device, settings)


def _build(models: ModelStore, device: torch.device, settings: ImageRewardSettings) -> Reward:
    folder, tokenizer = models.folder("image_reward"), models.folder("image_reward_tokenizer")
    if settings.backend == "image-reward":
        packages.check_installed("image-reward", "1.5", "rewards.image_reward.backend")
        return packages.as_reward(packages.image_reward(folder, tokenizer, device))
    return image_reward(folder, tokenizer, device, settings)


# a ViT-L/16 with BLIP's text encoder
SPEC = RewardSpec(
    "image_reward",
    "ImageReward",
    _build,
    settings=ImageRewardSettings,
    models=("image_reward", "image_reward_tokenizer"),
    size=ModelSize(446_720_000, 12 * 197 * 1024 * 4, 0.15e12),
)
