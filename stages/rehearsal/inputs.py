"""Makes a rehearsal's inputs instead of earlier stages: published configurations without weights, prompts encoded as zeros."""

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from diffusers import FlowMatchEulerDiscreteScheduler

from g2rpo_core.common.model_store import LOCK
from g2rpo_core.config.profile import Profile
from g2rpo_core.data.embeddings import Conditioning, write
from g2rpo_core.data.prompts import Prompt, write_prompts
from g2rpo_core.estimate import published
from g2rpo_core.tiny_models.tokenizers import bert_tokenizer, clip_tokenizer, t5_tokenizer

PROMPTS = 16  # of each set: those of an iteration
PIPELINE: dict[str, tuple[str, str, dict[str, Any]]] = {  # part: library, class, configuration
    "transformer": ("diffusers", "FluxTransformer2DModel", published.TRANSFORMER),
    "vae": ("diffusers", "AutoencoderKL", published.VAE),
    "text_encoder": ("transformers", "CLIPTextModel", published.CLIP_TEXT),
    "text_encoder_2": ("transformers", "T5EncoderModel", published.T5),
}


def make_inputs(home: Path, name: str, profile: Profile) -> None:
    """Makes what does not exist yet in `home`/inputs, for the profile of that name."""
    works: dict[str, Callable[[Path], None]] = {
        "models": make_models,
        "embeddings": partial(make_embeddings, profile=profile),
        "prompts": make_prompts,
    }
    for kind, make in works.items():
        folder = home / "inputs" / kind / name
        if not folder.exists():
            aside = folder.with_name(f"{name}.tmp")
            shutil.rmtree(aside, ignore_errors=True)
            aside.mkdir(parents=True)
            make(aside)
            aside.rename(folder)


def make_models(folder: Path) -> None:
    """The folder of the stage `models`: every part's configuration, and our own tokenizers."""
    pipeline = folder / "pipeline"
    index: dict[str, Any] = {"_class_name": "FluxPipeline", "feature_extractor": [None, None], "image_encoder": [None, None]}
    for part, (library, name, config) in PIPELINE.items():
        index[part] = [library, name]
        (pipeline / part).mkdir(parents=True)
        about = {
            **config,
            "_class_name": name,
            "architectures": [name],
            "model_type": "t5" if "T5" in name else "clip_text_model",
        }
        (pipeline / part / "config.json").write_text(json.dumps(about))
    for part, tokenizer in {"tokenizer": clip_tokenizer(), "tokenizer_2": t5_tokenizer()}.items():
        tokenizer.model_max_length = 77 if part == "tokenizer" else 512
        tokenizer.save_pretrained(pipeline / part)
        index[part] = ["transformers", type(tokenizer).__name__]
    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True)
    scheduler.save_pretrained(pipeline / "scheduler")
    index["scheduler"] = ["diffusers", type(scheduler).__name__]
    (pipeline / "model_index.json").write_text(json.dumps(index))

    (folder / "hps").mkdir()
    (folder / "hps" / "HPS_v2.1_compressed.safetensors").touch()
    (folder / "clip_score").mkdir()
    preprocess = {"mean": [0.5] * 3, "std": [0.25] * 3}
    about = {"model_cfg": published.OPEN_CLIP, "preprocess_cfg": preprocess}
    (folder / "clip_score" / "open_clip_config.json").write_text(json.dumps(about))
    (folder / "clip_score" / "open_clip_model.safetensors").touch()
    (folder / "pickscore").mkdir()
    (folder / "pickscore" / "config.json").write_text(json.dumps({**published.PICKSCORE, "model_type": "clip"}))
    clip_tokenizer().save_pretrained(folder / "pickscore_processor")
    how = {"image_mean": [0.5] * 3, "image_std": [0.25] * 3}
    (folder / "pickscore_processor" / "preprocessor_config.json").write_text(json.dumps(how))
    (folder / "image_reward").mkdir()
    (folder / "image_reward" / "ImageReward.safetensors").touch()
    (folder / "image_reward" / "med_config.json").write_text(json.dumps(published.IMAGE_REWARD_TEXT))
    bert_tokenizer().save_pretrained(folder / "image_reward_tokenizer")
    entries = {path.name: {"folder": path.name, "files": {}} for path in folder.iterdir()}
    entries["hps"]["architecture"] = "ViT-H-14"
    (folder / LOCK).write_text(json.dumps(entries))


def make_embeddings(folder: Path, profile: Profile) -> None:
    """The folder of the stage `embed`: prompts of both sets, each of the profile's length and the text encoders' width."""
    context = torch.zeros(profile.embed.max_sequence_length, published.T5["d_model"])
    zeros = Conditioning(context, torch.zeros(published.TRANSFORMER["pooled_projection_dim"]))
    for part in ("train", "test"):
        prompts = prompts_of(part)
        write(folder / part, prompts, lambda some: ((one, zeros) for one in some), profile.embed.dtype, profile.embed.shard_rows)


def make_prompts(folder: Path) -> None:
    """The folder of the stage `prompts`."""
    for part in ("train", "test"):
        write_prompts(folder / f"{part}.parquet", prompts_of(part))


def prompts_of(part: str) -> list[Prompt]:
    return [Prompt(f"{part}-{number:06d}", f"a red circle, {part} {number}", "none") for number in range(PROMPTS)]
