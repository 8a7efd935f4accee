"""Writes a run's weights to a folder, in a form that other programs read."""

import json
from pathlib import Path
from typing import Literal

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from g2rpo_core.bases.base import Base
from g2rpo_core.bases.table import base_of
from g2rpo_core.common.model_store import ModelStore
from g2rpo_core.errors import UserError
from g2rpo_core.export.lora import with_alpha, with_alpha_in_weights
from g2rpo_core.files import reading, remade_by
from g2rpo_core.models.loading import LORA_FILE

Form = Literal["diffusers", "original", "lora", "kohya"]


def check_form(models: Path, form: Form) -> Base:
    """The base model in the folder of the stage `models`; UserError if its weights have no such form."""
    base = base_of(ModelStore(models).folder("pipeline"))
    if form not in base.forms:
        raise UserError(f"export: {base.label} has no form {form}, only {', '.join(base.forms)}")
    return base


def write(models: Path, trained: Path, form: Form, out: Path, dtype: Literal["float32", "bfloat16"]) -> Path:
    """Writes the weights to `out` and returns the new file or folder.

    models: the folder of the stage `models`; trained: a run's `transformer`, or its `lora` for the last two forms.
    """
    kind, architecture = getattr(torch, dtype), check_form(models, form)
    transformer_class = architecture.transformer
    again = remade_by(f"train@{trained.parent.name}")
    if form == "diffusers":
        with reading(trained, again):
            transformer = transformer_class.from_pretrained(trained, dtype=kind)
        transformer.save_pretrained(out / "transformer")
        return out / "transformer"
    base = trained if form == "original" else ModelStore(models).folder("pipeline") / "transformer"
    with reading(base / "config.json", again):
        config = transformer_class.load_config(base)
    if form == "original":
        with reading(trained, again):
            state = transformer_class.from_pretrained(trained).state_dict()
        weights = architecture.original(state, config)
    else:
        with reading(trained / LORA_FILE, again), safe_open(trained / LORA_FILE, "pt") as opened:
            lora = load_file(trained / LORA_FILE)
            alpha = float(json.loads(opened.metadata()["lora_adapter_metadata"])["transformer.lora_alpha"])
        if form == "lora":
            weights = (with_alpha if architecture.alpha_in_lora else with_alpha_in_weights)(lora, alpha)
        else:
            with torch.device("meta"):
                shapes = {name: value.shape for name, value in transformer_class.from_config(config).state_dict().items()}
            weights = architecture.kohya(lora, shapes, alpha, config)
    cast = {key: value if key.endswith(".alpha") else value.to(kind) for key, value in weights.items()}
    file = out / (LORA_FILE if form == "lora" else f"{trained.parent.name}.safetensors")
    save_file({key: value.contiguous() for key, value in cast.items()}, file, metadata={"format": "pt"})
    return file
