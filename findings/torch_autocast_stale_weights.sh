#!/usr/bin/env bash
# torch 2.13.0, torch.autocast: weights that change between two forwards of one `with` block.
# One would expect the second forward to see them, above all under no_grad, where nothing is kept for a backward. The cast of every
# weight that requires gradients is cached until the block ends, by the weight's identity and not its version: a loop over several
# checkpoints or EMA and trained weights inside one block gives the first one's output for all. Frozen weights are not cached.
# Seen: 1 then 1 for a weight that went from 1 to 2; frozen, with cache_enabled=False or in a block of its own, 2.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cat >"$work/look.py" <<'PYTHON'
"""Change a weight from 1 to 2 between two forwards of one autocast block, and print both outputs."""
import contextlib

import torch

x = torch.ones(1, 1)


def outputs(frozen=False, cache=True, grad=contextlib.nullcontext):
    layer = torch.nn.Linear(1, 1, bias=False)
    layer.weight.requires_grad_(not frozen)
    with grad(), torch.autocast("cpu", torch.bfloat16, cache_enabled=cache):
        seen = []
        for value in (1.0, 2.0):
            layer.load_state_dict({"weight": torch.full((1, 1), value)})
            seen.append(layer(x).item())
    with torch.autocast("cpu", torch.bfloat16):
        return seen, "a block of its own:", layer(x).item()


print("with gradients", *outputs())
print("under no_grad", *outputs(grad=torch.no_grad))
print("frozen", *outputs(frozen=True))
print("cache_enabled=False", *outputs(cache=False))
PYTHON
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 numpy==2.4.6
"$work/venv/bin/python" "$work/look.py" | tee "$work/seen"
diff "$work/seen" - <<'EXPECTED'
with gradients [1.0, 1.0] a block of its own: 2.0
under no_grad [1.0, 1.0] a block of its own: 2.0
frozen [1.0, 2.0] a block of its own: 2.0
cache_enabled=False [1.0, 2.0] a block of its own: 2.0
EXPECTED
