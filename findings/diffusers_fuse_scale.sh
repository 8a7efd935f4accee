#!/usr/bin/env bash
# diffusers 0.42.1 with peft 0.21.2, fuse_lora(lora_scale=.5): "controls how much to influence the outputs with the LoRA parameters".
# One would expect that unfuse_lora gives the model back as it was. The scale is multiplied into the adapter and stays there: unfused,
# the LoRA goes on at half of its weight, and fused again with .5 it counts a quarter.
# Seen: weights 1, and after each round of fuse and unfuse .5, .25, .125; set_adapters brings back the wanted one.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cat >"$work/look.py" <<'PYTHON'
"""Fuse and unfuse a LoRA of a small FLUX transformer, and print its weight."""
import torch
from diffusers import FluxTransformer2DModel
from peft import LoraConfig

heads = {"num_layers": 1, "num_single_layers": 1, "attention_head_dim": 8, "num_attention_heads": 2, "axes_dims_rope": (2, 2, 4)}
model = FluxTransformer2DModel(in_channels=4, joint_attention_dim=16, pooled_projection_dim=16, **heads)
model.add_adapter(LoraConfig(r=2, lora_alpha=2, target_modules=["to_q"], init_lora_weights=False), "style")
layer = model.transformer_blocks[0].attn.to_q
base = layer.base_layer.weight.detach().clone()
lora = layer.get_delta_weight("style").detach()


def share():
    """Measure how much of the LoRA is in the weights now."""
    return round((((layer.base_layer.weight - base) * lora).sum() / lora.square().sum()).item(), 3)


print("weight at first:", layer.scaling["style"])
for _ in range(3):
    model.fuse_lora(lora_scale=0.5)
    fused = share()
    model.unfuse_lora()
    print("fused:", fused, "unfused:", abs(share()), "weight then:", layer.scaling["style"])
model.set_adapters("style", 1.0)
print("after set_adapters:", layer.scaling["style"])
PYTHON
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 diffusers==0.42.1 peft==0.21.2 transformers==5.23.0
"$work/venv/bin/python" "$work/look.py" | tee "$work/seen"
diff "$work/seen" - <<'EXPECTED'
weight at first: 1.0
fused: 0.5 unfused: 0.0 weight then: 0.5
fused: 0.25 unfused: 0.0 weight then: 0.25
fused: 0.125 unfused: 0.0 weight then: 0.125
after set_adapters: 1.0
EXPECTED
