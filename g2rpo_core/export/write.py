"""Writes a run's weights to a folder, in a form that other programs read."""

import json
from pathlib import Path
from typing import Literal

import torch
from diffusers import FluxTransformer2DModel
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from g2rpo_core.common.model_store import ModelStore
from g2rpo_core.export import layouts
from g2rpo_core.files import reading, remade_by
from g2rpo_core.models.loading import LORA_FILE

Form = Literal["diffusers", "original", "lora", "kohya"]


def write(models: Path, trained: Path, form: Form, out: Path, dtype: Literal["float32", "bfloat16"]) -> Path:
    """Writes the weights to `out` and returns the new file or folder.

    models: the folder of the stage `models`; trained: a run's `transformer`, or its `lora` for the last two forms.
    """
    kind = getattr(torch, dtype)
    again = remade_by(f"train@{trained.parent.name}")
    if form == "diffusers":
        with reading(trained, again):
            transformer = FluxTransformer2DModel.from_pretrained(trained, dtype=kind)
        transformer.save_pretrained(out / "transformer")
        return out / "transformer"
    base = trained if form == "original" else ModelStore(models).folder("pipeline") / "transformer"
    with reading(base / "config.json", again):
        config = FluxTransformer2DModel.load_config(base)
        depth = (config["num_layers"], config["num_single_layers"])
    if form == "original":
        with reading(trained, again):
            state = FluxTransformer2DModel.from_pretrained(trained).state_dict()
        weights = layouts.original(state, *depth)
    else:
        with reading(trained / LORA_FILE, again), safe_open(trained / LORA_FILE, "pt") as opened:
            lora = load_file(trained / LORA_FILE)
            alpha = float(json.loads(opened.metadata()["lora_adapter_metadata"])["transformer.lora_alpha"])
        if form == "lora":
            weights = layouts.with_alpha(lora, alpha)
        else:
            with torch.device("meta"):
                shapes = {name: value.shape for name, value in FluxTransformer2DModel.from_config(config).state_dict().items()}
            weights = layouts.kohya(lora, shapes, alpha, *depth)
    cast = {key: value if key.endswith(".alpha") else value.to(kind) for key, value in weights.items()}
    file = out / (LORA_FILE if form == "lora" else f"{trained.parent.name}.safetensors")
    save_file({key: value.contiguous() for key, value in cast.items()}, file, metadata={"format": "pt"})
    return file
