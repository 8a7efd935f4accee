#!/usr/bin/env bash
# peft 0.21.2 with torch 2.13.0: a LoRA on linear1 and linear2 of torch.nn.TransformerEncoderLayer.
# One would expect eval() to compute what train() does where there is no dropout. In eval() the layer hands its children's weights,
# not the children, to one fused kernel unless one of these requires gradients; a wrapped child's weight is the frozen base's. So the
# LoRA trains as it should and is left out of every evaluation, unless torch.backends.mha.set_fastpath_enabled(False) is called.
# Seen: the LoRA changes the output in train(), not in eval(), and again in eval() without the fast path. No warning.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cat >"$work/look.py" <<'PYTHON'
"""Say in which modes the output of an encoder layer with a LoRA differs from the base's."""
import warnings

import torch
from peft import LoraConfig, get_peft_model


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)

    def forward(self, x):
        return self.layer(x)


x = torch.randn(1, 3, 8, generator=torch.Generator().manual_seed(1))
base = Model()(x)
config = LoraConfig(r=2, target_modules=["linear1", "linear2"], init_lora_weights=False)


def compare(where):
    print(f"{where}: the LoRA {'does nothing' if torch.allclose(model(x), base, atol=1e-3) else 'counts'}")


with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    model = get_peft_model(Model(), config)
    model.train()
    compare("train()")
    model.eval()
    compare("eval()")
    torch.backends.mha.set_fastpath_enabled(False)
    compare("eval() without the fast path")
print("warnings of a LoRA:", sum("LoRA" in str(warning.message) for warning in caught))
PYTHON
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 peft==0.21.2 transformers==5.23.0
"$work/venv/bin/python" "$work/look.py" | tee "$work/seen"
diff "$work/seen" - <<'EXPECTED'
train(): the LoRA counts
eval(): the LoRA does nothing
eval() without the fast path: the LoRA counts
warnings of a LoRA: 0
EXPECTED
