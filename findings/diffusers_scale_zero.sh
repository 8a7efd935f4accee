#!/usr/bin/env bash
# diffusers 0.42.1 with peft 0.21.2: joint_attention_kwargs={"scale": 0} asks one call for the base without its LoRA.
# One would expect the call after it to be as the one before. A scale is undone by dividing by it, which 0 does not allow; there the
# weight is set to 1, whatever set_adapters had asked for. Any other scale is undone rightly. No word of it.
# Seen: weight .5; after a call at scale .3 it is .5, after one at scale 0 it is 1, and the same input gives another output.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cat >"$work/look.py" <<'PYTHON'
"""Call a small FLUX transformer at other scales of its LoRA, and print the weight that is left."""
import torch
from diffusers import FluxTransformer2DModel
from peft import LoraConfig

torch.manual_seed(0)
heads = {"num_layers": 1, "num_single_layers": 1, "attention_head_dim": 8, "num_attention_heads": 2, "axes_dims_rope": (2, 2, 4)}
model = FluxTransformer2DModel(in_channels=4, joint_attention_dim=16, pooled_projection_dim=16, **heads)
model.add_adapter(LoraConfig(r=2, lora_alpha=2, target_modules=["to_q", "to_v"], init_lora_weights=False), "style")
model.set_adapters("style", 0.5)
inputs = {
    "hidden_states": torch.randn(1, 4, 4),
    "encoder_hidden_states": torch.randn(1, 3, 16),
    "pooled_projections": torch.randn(1, 16),
    "timestep": torch.tensor([0.5]),
    "img_ids": torch.zeros(4, 3),
    "txt_ids": torch.zeros(3, 3),
}
with torch.no_grad():
    first = model(**inputs).sample
    for scale in (0.3, 0.0):
        model(**inputs, joint_attention_kwargs={"scale": scale})
        weight = round(model.transformer_blocks[0].attn.to_q.scaling["style"], 3)
        same = torch.allclose(model(**inputs).sample, first, atol=1e-5)
        print(f"after a call at scale {scale}: weight {weight}, same output as at first {same}")
PYTHON
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 diffusers==0.42.1 peft==0.21.2 transformers==5.23.0
"$work/venv/bin/python" "$work/look.py" | tee "$work/seen"
diff "$work/seen" - <<'EXPECTED'
after a call at scale 0.3: weight 0.5, same output as at first True
after a call at scale 0.0: weight 1.0, same output as at first False
EXPECTED
