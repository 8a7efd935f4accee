"""Make full-size transformers with random weights, for measurements on a GPU without downloads."""

import json
import tempfile
from pathlib import Path

import torch
from diffusers.models.modeling_utils import ModelMixin

from g2rpo_core.architectures.architecture import Architecture, Config
from g2rpo_core.models.loading import allocate, draw_lora, empty_transformer, lora_config
from g2rpo_core.models.quantized import Kind, QuantizedLinear, frozen_layers
from g2rpo_core.models.settings import LoraSettings


@torch.no_grad()
def drawn_transformer(
    architecture: Architecture,
    config: Config,
    device: torch.device,
    lora: LoraSettings | None = None,
    quantized: Kind | None = None,
) -> ModelMixin:
    """Return a frozen bfloat16 transformer with random weights on `device`.

    It never holds more than the finished model and one layer. lora: an adapter in float32 that
    trains; quantized: how the blocks' frozen weights are kept (`quantize`).
    """
    # Without data
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(dict(config)))
        transformer = empty_transformer(
            architecture,
            Path(folder),
            torch.bfloat16,
            False,
            lora_config(architecture, lora) if lora else None,
        )
    # Layers that are quantized, one after the other, then the rest
    layers = frozen_layers(architecture.blocks(transformer)) if quantized else []
    while quantized and layers:
        module, name, layer = layers.pop()  # so that nothing holds its weights any more
        fill(layer, device)
        setattr(module, name, QuantizedLinear(layer, quantized, device))
    fill(transformer, device)
    if lora:
        draw_lora(transformer, lora.rank, torch.Generator().manual_seed(0))
    return transformer


def fill(module: torch.nn.Module, device: torch.device) -> None:
    """Allocate and draw what is empty: matrices N(0, 1 / inputs), norms' weights 1, biases 0.

    Buffers that a file would hold, as SD3's position embeddings, are drawn like matrices.
    """
    tensors = lambda: dict([*module.named_parameters(), *module.named_buffers()])
    empty = [name for name, tensor in tensors().items() if tensor.is_meta]
    allocate(module, device)
    drawn = tensors()
    for name in empty:
        if drawn[name].ndim > 1:
            drawn[name].normal_(std=drawn[name][0].numel() ** -0.5)
        else:
            drawn[name].fill_(1.0 if name.endswith("weight") else 0.0)
