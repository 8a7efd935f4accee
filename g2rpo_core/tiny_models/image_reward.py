"""Train the tiny ImageReward, BLIP towers on a task's images, and save it in the published form."""

import json
import re
from pathlib import Path

import torch
import torch.nn.functional as F
from open_clip.constants import OPENAI_DATASET_MEAN, OPENAI_DATASET_STD
from torch import nn
from transformers import BertTokenizer, BlipTextConfig, BlipVisionConfig

from g2rpo_core.rewards.image_reward import MED_CONFIG, ImageRewardModel
from g2rpo_core.tasks.task import Task
from g2rpo_core.tiny_models.clip import contrastive_loss, degrade, pairs
from g2rpo_core.tiny_models.fit import fit
from g2rpo_core.tiny_models.settings import FitSettings
from g2rpo_core.tiny_models.tokenizers import bert_tokenizer

WIDTH, TEXT_WIDTH, EMBEDDING = 128, 96, 256
INITIAL = 0.1  # deviation of initial weights; at BERT's 0.02, so narrow a tower does not learn
TEMPERATURE = 0.07  # of the contrastive loss; the published BLIP starts there and learns it
PUBLISHED = [  # the names of transformers in those of `ImageReward.pt`, see RENAMED of the reward
    (r"^vision\.embeddings\.class_embedding$", "blip.visual_encoder.cls_token"),
    (r"^vision\.embeddings\.position_embedding$", "blip.visual_encoder.pos_embed"),
    (r"^vision\.embeddings\.patch_embedding\.", "blip.visual_encoder.patch_embed.proj."),
    (r"^vision\.post_layernorm\.", "blip.visual_encoder.norm."),
    (r"^vision\.encoder\.layers\.(\d+)\.", r"blip.visual_encoder.blocks.\1."),
    (r"\.layer_norm([12])\.", r".norm\1."),
    (r"\.self_attn\.qkv\.", ".attn.qkv."),
    (r"\.self_attn\.projection\.", ".attn.proj."),
    (r"^text\.", "blip.text_encoder."),
    (r"^head\.", "mlp.layers."),
]


def train_image_reward(
    task: Task, settings: FitSettings, seed: int, scenes: int
) -> tuple[nn.ModuleDict, dict]:
    """Train the reward model and BLIP's two projections by BLIP's and ImageReward's losses at once.

    BLIP's is contrastive, ImageReward's a ranking: of two images for one caption, the right and
    clean one should score over a neighbour's (a scene with one attribute changed), and over a
    degraded copy of itself.
    """
    # Model: image and text tower, and BLIP's projections
    torch.manual_seed(seed)
    tokenizer = bert_tokenizer(task)
    reward = _reward(task, tokenizer)
    model = nn.ModuleDict(
        {
            "reward": reward,
            "vision_proj": nn.Linear(WIDTH, EMBEDDING),
            "text_proj": nn.Linear(TEXT_WIDTH, EMBEDDING),
        }
    )
    # Data: pairs of a scene and its neighbour
    captions, images, other_captions, other_images = pairs(task, scenes, seed, testing=False)
    encoded = tokenizer(captions + other_captions, padding=True, return_tensors="pt")
    tokens, masks = encoded.input_ids, encoded.attention_mask
    generator = torch.Generator().manual_seed(seed)
    mean, std = (
        torch.tensor(values).view(3, 1, 1) for values in (OPENAI_DATASET_MEAN, OPENAI_DATASET_STD)
    )

    def compute_loss(indices):
        count = len(indices)
        rows = torch.cat([indices, indices + len(captions)])
        token, mask = tokens[rows], masks[rows]
        clean = torch.cat([images[indices], other_images[indices]])
        seen = torch.cat(
            [
                degrade(task, clean, clean.roll(1, 0), 0.4, generator),
                degrade(task, clean[:count], clean[count:], 1.0, generator),
            ]
        )
        # States of right images, neighbours, degraded ones
        seen = reward.vision((seen - mean) / std).last_hidden_state
        # Contrast of captions and images, as BLIP has it
        image = F.normalize(model["vision_proj"](seen[: 2 * count, 0]), dim=-1)
        words = reward.text(token, attention_mask=mask, is_decoder=False).last_hidden_state
        caption = F.normalize(model["text_proj"](words[:, 0]), dim=-1)
        contrast = contrastive_loss(image @ caption.T / TEMPERATURE)
        # Ranking of the right image over the neighbour's and the degraded one
        states = reward.text(
            token[:count].repeat(3, 1),
            attention_mask=mask[:count].repeat(3, 1),
            encoder_hidden_states=seen,
            is_decoder=False,
        ).last_hidden_state
        right, wrong, bad = reward.head(states[:, 0]).squeeze(1).split(count)
        return contrast + F.softplus(wrong - right).mean() + F.softplus(bad - right).mean()

    loss = fit([model], compute_loss, settings, generator, len(captions), "image reward")
    return model.eval(), {"loss": loss, "parameters": sum(p.numel() for p in model.parameters())}


def _reward(task: Task, tokenizer: BertTokenizer) -> ImageRewardModel:
    """Return the reward model with random weights: image tower, text tower and head."""
    vision = BlipVisionConfig(
        hidden_size=WIDTH,
        intermediate_size=4 * WIDTH,
        num_hidden_layers=2,
        num_attention_heads=WIDTH // 64,  # as wide as in BLIP's base and large size
        image_size=task.size,
        patch_size=8,
        hidden_act="gelu",
        layer_norm_eps=1e-6,
        initializer_range=INITIAL,
    )
    text = BlipTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=TEXT_WIDTH,
        intermediate_size=4 * TEXT_WIDTH,
        num_hidden_layers=2,
        num_attention_heads=3,
        encoder_hidden_size=WIDTH,
        pad_token_id=tokenizer.pad_token_id,
        initializer_range=INITIAL,
    )
    return ImageRewardModel(vision, text)


def save_image_reward(model: nn.ModuleDict, task: Task, folder: Path, tokenizer: Path) -> None:
    """Write ImageReward.pt and med_config.json as in `THUDM/ImageReward`, and the tokenizer.

    The tokenizer has the form of bert-base-uncased's.
    """
    folder.mkdir(parents=True)
    weights = {
        f"blip.{name}": value
        for name, value in model.state_dict().items()
        if not name.startswith("reward.")
    }
    for name, value in model["reward"].state_dict().items():
        for pattern, replacement in PUBLISHED:
            name = re.sub(pattern, replacement, name)
        weights[name] = value
    text = model["reward"].text.config
    weights["blip.text_encoder.embeddings.position_ids"] = torch.arange(
        text.max_position_embeddings
    )[None]
    torch.save(weights, folder / "ImageReward.pt")
    med_config = {
        "architectures": ["BertModel"],
        "model_type": "bert",
        "add_cross_attention": True,
        "encoder_width": WIDTH,
        "attention_probs_dropout_prob": 0.1,
        "hidden_dropout_prob": 0.1,
        "initializer_range": 0.02,
        "type_vocab_size": 2,
    }
    med_config |= {key: getattr(text, key) for key in MED_CONFIG}
    (folder / "med_config.json").write_text(json.dumps(med_config, indent=1))
    bert_tokenizer(task).save_pretrained(tokenizer)
