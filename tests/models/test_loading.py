"""Weights wherever they lie: runs, exported folders, and what others publish."""

import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import save_file

from g2rpo_core.foundation.errors import UserError
from g2rpo_core.models.policy import Policy
from g2rpo_core.models.settings import LoraSettings
from g2rpo_core.sampling.settings import SamplingSettings
from tests.fixtures.errors import refused

HOW = {"height": 32, "width": 32, "guidance": 3.5}


def test_a_lora_of_layers_that_are_not_there_is_one_line_about_the_setting(models):
    lora = LoraSettings(rank=2, alpha=4.0, target_modules=("to_querry",))
    with refused("no module of FluxTransformer2DModel is called to_querry"):
        Policy.load_to_train(models / "pipeline", lora, **HOW)


@pytest.mark.parametrize(
    "files, message",
    [
        ({}, "no safetensors; it must hold a transformer or a LoRA"),
        (
            {"pytorch_lora_weights": "x.lora_A.weight", "adapter_model": "x.lora_A.weight"},
            r"2 files of weights \(adapter_model.*; pytorch_lora_weights.*\): name one",
        ),
        (
            {"a": "unet.x.lora_A.weight"},
            r"is a LoRA of a U-Net, .* no place in this FLUX.1's .* \(unet.x.lora_A.weight\)",
        ),
        (
            {"a": "double_blocks.0.img_attn.qkv.weight"},
            "its weights belong to another model, or are incomplete",
        ),
        ({"a": "x.attn.to_qkv.weight"}, r"is of fused attention \(x.*unfuse_qkv_projections"),
        ({"a": "x.attn.to_kv.lora_A.weight"}, r"is of fused attention"),
        ({"a": "x.base_layer.weight"}, "saved with its adapter attached: .*`save_lora_adapter`"),
        ({"a": "x.weight.absmax"}, r"quantized \(bitsandbytes: x.weight.absmax\): take those"),
        ({"a": "x._weight_qdata"}, "quantized .torchao"),
        ({"a": "x.weight._scale"}, "quantized .optimum-quanto"),
        ({"a": "x.wscales"}, "quantized .nunchaku"),
        ({"a": "x.qweight"}, "quantized .GPTQ or AWQ"),
        ({"a": "scaled_fp8"}, "quantized .ComfyUI"),
        ({"a": "x.weight_scale"}, "quantized .scales beside"),
        ({"a": "GGUF"}, r"a.safetensors: its weights are quantized \(GGUF\)"),
    ],
)
def test_weights_that_cannot_be_read_are_named(models, tmp_path, files, message):
    for name, key in files.items():
        path = tmp_path / f"{name}.safetensors"
        save_file({key: torch.zeros(2, 2)}, path)
        if key == "GGUF":
            path.write_bytes(b"GGUF\x03\x00\x00\x00")
    with pytest.raises(UserError, match=message):
        Policy.load(models / "pipeline", tmp_path, **HOW)


def test_a_backend_that_this_machine_or_model_lacks_ends_in_one_line(models, sd3_models, tiny):
    for folder, backend, message in (
        (models, "flash", "sampling.attention: flash cannot be used here .*flash-attn"),
        (
            sd3_models,
            "native",
            "SD3Transformer2DModel has attention that takes no backend: set it to null",
        ),
    ):
        with refused(message):
            Policy.load(folder / "pipeline", attention=backend, **HOW)
    with pytest.raises(ValidationError, match="must be one of flash, .*native, .*xformers, or"):
        SamplingSettings.model_validate({**tiny.sampling.model_dump(), "attention": "fast"})
