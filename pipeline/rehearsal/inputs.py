"""Make a rehearsal's inputs: published configurations without weights, encodings of zeros."""

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from diffusers import FlowMatchEulerDiscreteScheduler

from g2rpo_core.config.profile import Profile
from g2rpo_core.data.embeddings import Conditioning, write, write_negative, write_online
from g2rpo_core.data.prompts import Prompt, write_prompts
from g2rpo_core.estimate.tracing import CLIP_TOKENS, encoding_shapes, shape_of
from g2rpo_core.hub.model_store import LOCK
from g2rpo_core.tasks.table import TASKS
from g2rpo_core.tiny_models.tokenizers import TOKENIZERS, bert_tokenizer, clip_tokenizer

# Published shapes of the rewards' models; those of base models are in `g2rpo_core/architectures`
OPEN_CLIP: dict[
    str, Any
] = {  # ViT-H-14 as open_clip has it: HPS-v2.1's and CLIP Score's architecture
    "embed_dim": 1024,
    "vision_cfg": {
        "image_size": 224,
        "layers": 32,
        "width": 1280,
        "head_width": 80,
        "patch_size": 14,
    },
    "text_cfg": {
        "context_length": 77,
        "vocab_size": 49408,
        "width": 1024,
        "heads": 16,
        "layers": 24,
    },
}
PICKSCORE: dict[str, Any] = {  # config.json of yuvalkirstain/PickScore_v1
    "projection_dim": 1024,
    "text_config": {
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_attention_heads": 16,
        "num_hidden_layers": 24,
        "hidden_act": "gelu",
        "projection_dim": 1024,
    },
    "vision_config": {
        "hidden_size": 1280,
        "intermediate_size": 5120,
        "num_attention_heads": 16,
        "num_hidden_layers": 32,
        "hidden_act": "gelu",
        "patch_size": 14,
        "projection_dim": 1024,
    },
}
IMAGE_REWARD_TEXT: dict[str, Any] = {  # med_config.json of zai-org/ImageReward
    "vocab_size": 30524,
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "max_position_embeddings": 512,
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-12,
    "pad_token_id": 0,
}
IMAGE_REWARD_IMAGE: dict[str, Any] = {  # BLIP's ViT-L/16
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "image_size": 224,
    "patch_size": 16,
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-6,
}
PROMPTS = 16  # of each set: those of an iteration
ANY_TASK = TASKS["shapes"]  # no text is looked at
LENGTHS = {"clip": CLIP_TOKENS, "t5": 512, "qwen": 131_072}  # of published tokenizers, by kind


def make_inputs(home: Path, name: str, profile: Profile) -> None:
    """Make what does not exist yet in `home`/inputs, for the profile of that name."""
    works: dict[str, Callable[[Path], None]] = {
        "models": partial(make_models, profile=profile),
        "embeddings": partial(make_embeddings, profile=profile),
        "prompts": make_prompts,
    }
    for kind, make in works.items():
        folder = home / "inputs" / kind / name
        if not folder.exists():
            unfinished = folder.with_name(f"{name}.tmp")
            shutil.rmtree(unfinished, ignore_errors=True)
            unfinished.mkdir(parents=True)
            make(unfinished)
            unfinished.rename(folder)


def make_models(folder: Path, profile: Profile) -> None:
    """Make the folder of the stage `models`: every part's configuration, and our own tokenizers."""
    # Configurations of the pipeline's networks
    base, shape = shape_of(profile)
    pipeline = folder / "pipeline"
    index: dict[str, Any] = {
        "_class_name": base.pipeline.__name__,
        "feature_extractor": [None, None],
        "image_encoder": [None, None],
    }
    parts = {
        "transformer": ("diffusers", base.transformer.__name__, shape.transformer),
        "vae": ("diffusers", base.vae.__name__, shape.vae),
        **{part: ("transformers", name, config) for part, (name, config) in shape.encoders.items()},
    }
    for part, (library, name, config) in parts.items():
        index[part] = [library, name]
        (pipeline / part).mkdir(parents=True)
        named = {**config, "_class_name": name, "architectures": [name]}
        if library == "transformers":
            named["model_type"] = getattr(transformers, name).config_class.model_type
        (pipeline / part / "config.json").write_text(json.dumps(named))
    # Tokenizers and scheduler
    for part, kind in base.tokenizers.items():
        tokenizer = TOKENIZERS[kind](ANY_TASK)
        tokenizer.model_max_length = LENGTHS[kind]
        tokenizer.save_pretrained(pipeline / part)
        index[part] = ["transformers", type(tokenizer).__name__]
    scheduler = FlowMatchEulerDiscreteScheduler(**shape.scheduler)
    scheduler.save_pretrained(pipeline / "scheduler")
    index["scheduler"] = ["diffusers", type(scheduler).__name__]
    (pipeline / "model_index.json").write_text(json.dumps(index))

    # Rewards: configurations, and empty files where the product looks for weights
    (folder / "hps").mkdir()
    (folder / "hps" / "HPS_v2.1_compressed.safetensors").touch()
    (folder / "clip_score").mkdir()
    preprocess = {"mean": [0.5] * 3, "std": [0.25] * 3}
    about = {"model_cfg": OPEN_CLIP, "preprocess_cfg": preprocess}
    (folder / "clip_score" / "open_clip_config.json").write_text(json.dumps(about))
    (folder / "clip_score" / "open_clip_model.safetensors").touch()
    (folder / "pickscore").mkdir()
    (folder / "pickscore" / "config.json").write_text(
        json.dumps({**PICKSCORE, "model_type": "clip"})
    )
    clip_tokenizer().save_pretrained(folder / "pickscore_processor")
    how = {"image_mean": [0.5] * 3, "image_std": [0.25] * 3}
    (folder / "pickscore_processor" / "preprocessor_config.json").write_text(json.dumps(how))
    (folder / "image_reward").mkdir()
    (folder / "image_reward" / "ImageReward.safetensors").touch()
    (folder / "image_reward" / "med_config.json").write_text(json.dumps(IMAGE_REWARD_TEXT))
    bert_tokenizer(ANY_TASK).save_pretrained(folder / "image_reward_tokenizer")
    entries = {path.name: {"folder": path.name, "files": {}} for path in folder.iterdir()}
    entries["hps"]["architecture"] = "ViT-H-14"
    (folder / LOCK).write_text(json.dumps(entries))


def make_embeddings(folder: Path, profile: Profile) -> None:
    """Make the folder of the stage `embed` for the prompts of both sets.

    Encodings have the profile's length and the text encoders' width.
    """
    base, shape = shape_of(profile)
    shapes = encoding_shapes(base, shape, profile.embed.max_sequence_length)
    zeros = {name: torch.zeros(size) for name, size in shapes.items()}
    for part in ("train", "test"):
        prompts = make_prompt_set(part)
        encoded = lambda some: ((one, Conditioning(zeros)) for one in some)
        if part == "train" and profile.embed.encode == "online":
            write_online(
                folder / part, prompts, profile.embed.dtype, profile.embed.max_sequence_length
            )
        else:
            write(folder / part, prompts, encoded, profile.embed.dtype, profile.embed.shard_rows)
        if base.has_negative:
            write_negative(
                folder / part,
                {name: tensor[None] for name, tensor in zeros.items()},
                profile.embed.dtype,
            )


def make_prompts(folder: Path) -> None:
    """Make the folder of the stage `prompts`."""
    for part in ("train", "test"):
        write_prompts(folder / f"{part}.parquet", make_prompt_set(part))


def make_prompt_set(part: str) -> list[Prompt]:
    return [
        Prompt(f"{part}-{number:06d}", f"a red circle, {part} {number}", "none")
        for number in range(PROMPTS)
    ]
