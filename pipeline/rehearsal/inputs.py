"""Make a rehearsal's inputs: a short profile, prompts, and models without weights."""

import json
from pathlib import Path
from typing import Any

import transformers
from diffusers import FlowMatchEulerDiscreteScheduler
from ruamel.yaml import YAML

from g2rpo_core.config import Profile, profile_path, resolve
from g2rpo_core.data.prompts import Prompt, write_prompts
from g2rpo_core.estimate.tracing import CLIP_TOKENS, shape_of
from g2rpo_core.hub.model_store import LOCK
from g2rpo_core.tasks.table import TASKS
from g2rpo_core.tiny_models.tokenizers import TOKENIZERS

# ViT-H-14 as open_clip has it: HPS-v2.1's and CLIP Score's architecture
OPEN_CLIP: dict[str, Any] = {
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
ITERATIONS = 2  # AdamW has its moments from the second on
ANY_TASK = TASKS["shapes"]  # no text is looked at
LENGTHS = {"clip": CLIP_TOKENS, "t5": 512, "qwen": 131_072}  # of published tokenizers, by kind


def write_profile(folder: Path, name: str, method: str, gpus: int) -> None:
    """Write the profile with a method and two iterations that include everything, to `folder`."""
    data = resolve(profile_path(name)).data
    training, evaluation = data["training"], data["evaluation"]
    training |= {
        "iterations": ITERATIONS,
        "snapshots": [],
        "tracking": {"to": []},
        "processes": gpus,
        "start": None,
    }
    training["monitor"] |= {
        "every": ITERATIONS,
        "prompts": min(8, training["monitor"]["prompts"]),
    }
    evaluation |= {"steps": evaluation["steps"][:1], "checkpoints": ["final"], "diversity": None}
    data["methods"] = {method: data["methods"][method]}
    folder.mkdir()
    with (folder / f"{name}.yaml").open("w") as file:
        YAML().dump(data, file)


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

    # Rewards: a configuration, and empty files where the product looks for weights
    about = {"model_cfg": OPEN_CLIP, "preprocess_cfg": {"mean": [0.5] * 3, "std": [0.25] * 3}}
    files = {
        "hps/HPS_v2.1_compressed.safetensors": "",
        "clip_score/open_clip_config.json": json.dumps(about),
        "clip_score/open_clip_model.safetensors": "",
    }
    for name, text in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    more = {"pipeline": {}, "hps": {"architecture": "ViT-H-14"}, "clip_score": {}}
    entries = {part: {"folder": part, "files": {}, **also} for part, also in more.items()}
    (folder / LOCK).write_text(json.dumps(entries))


def make_prompts(folder: Path, profile: Profile) -> None:
    """Make the folder of the stage `prompts`: those of an iteration, and of one evaluated batch."""
    folder.mkdir(parents=True)
    counts = {"train": profile.training.prompts_per_iteration, "test": profile.evaluation.batch}
    for part, count in counts.items():
        write_prompts(
            folder / f"{part}.parquet",
            [
                Prompt(f"{part}-{number:06d}", f"a red circle, {part} {number}", "none")
                for number in range(count)
            ],
        )
