#!/usr/bin/env bash
# peft 0.21.2 with optimum-quanto 0.2.7: merge_and_unload of a LoRA on weights that quanto has frozen in int8 or float8.
# One would expect them merged, as with other quantizations, or refused. quanto's QLinear is a torch.nn.Linear, so that PEFT's plain
# LoRA layer takes it and adds to `weight.data`; quanto answers with an unpacked copy, which is thrown away.
# Seen: the LoRA counts until it is merged, and afterwards the model computes exactly what the base did. No error, no warning.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cat >"$work/look.py" <<'PYTHON'
"""Merge a LoRA into quantized weights, and say whose output it is."""
import warnings

import torch
from optimum.quanto import freeze, qfloat8, qint8, quantize
from peft import LoraConfig, get_peft_model

for name, kind in {"int8": qint8, "float8": qfloat8}.items():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64))
    x = torch.randn(2, 64)
    quantize(model, weights=kind)
    freeze(model)
    base = model(x)
    model = get_peft_model(model, LoraConfig(r=4, target_modules=["0"], init_lora_weights=False))
    adapted = model(x)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        merged = model.merge_and_unload()(x)
    near = [who for who, other in {"the LoRA's": adapted, "the base's": base}.items() if torch.allclose(merged, other, atol=1e-2)]
    told = sum("merg" in str(warning.message) for warning in caught)
    print(f"{name}: the LoRA moves by over .5: {(adapted - base).abs().max().item() > 0.5}, merged output is {near}, warnings: {told}")
PYTHON
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 peft==0.21.2 transformers==5.23.0 optimum-quanto==0.2.7
"$work/venv/bin/python" "$work/look.py" | tee "$work/seen"
diff "$work/seen" - <<'EXPECTED'
int8: the LoRA moves by over .5: True, merged output is ["the base's"], warnings: 0
float8: the LoRA moves by over .5: True, merged output is ["the base's"], warnings: 0
EXPECTED
