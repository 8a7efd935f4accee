#!/usr/bin/env bash
# peft 0.21.2, `alpha_pattern` (and `rank_pattern`) with two keys that both fit a module: the first in the dictionary counts.
# One would expect that a saved adapter computes the same when it is loaded. save_pretrained sorts the keys, so that a general key
# that sorts before the special one takes its modules: their scale is another after loading, without a word.
# Seen: scales 8 and 2 when saved, 2 and 2 when loaded; with rank_pattern loading stops with a RuntimeError.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cat >"$work/look.py" <<'PYTHON'
"""Save a LoRA with a special and a general key, load it onto the same base, and compare."""
import sys

import torch
from peft import LoraConfig, PeftModel, get_peft_model

SPECIAL, GENERAL = "transformer_blocks.0.to_q", "to_q"


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.transformer_blocks = torch.nn.ModuleList(torch.nn.ModuleDict({"to_q": torch.nn.Linear(4, 4)}) for _ in range(2))

    def forward(self, x):
        for block in self.transformer_blocks:
            x = block["to_q"](x)
        return x


def scales(model):
    return [block["to_q"].scaling["default"] for block in model.base_model.model.transformer_blocks]


config = LoraConfig(r=2, lora_alpha=2, target_modules=["to_q"], alpha_pattern={SPECIAL: 16, GENERAL: 4}, init_lora_weights=False)
saved = get_peft_model(Model(), config)
saved.save_pretrained(sys.argv[1] + "/alpha")
loaded = PeftModel.from_pretrained(Model(), sys.argv[1] + "/alpha")
x = torch.ones(1, 4)
print("scales when saved", scales(saved), "when loaded", scales(loaded), "same output", torch.allclose(saved(x), loaded(x), atol=1e-3))
config = LoraConfig(r=2, target_modules=["to_q"], rank_pattern={SPECIAL: 3, GENERAL: 4})
get_peft_model(Model(), config).save_pretrained(sys.argv[1] + "/rank")
try:
    PeftModel.from_pretrained(Model(), sys.argv[1] + "/rank")
    print("rank_pattern: loaded")
except RuntimeError:
    print("rank_pattern: RuntimeError")
PYTHON
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 peft==0.21.2 transformers==5.23.0
"$work/venv/bin/python" "$work/look.py" "$work" | tee "$work/seen"
diff "$work/seen" - <<'EXPECTED'
scales when saved [8.0, 2.0] when loaded [2.0, 2.0] same output False
rank_pattern: RuntimeError
EXPECTED
