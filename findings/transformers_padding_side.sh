#!/usr/bin/env bash
# transformers 5.23.0: tokenizer.padding_side = "left", as one sets it before generating or encoding prompts, and save_pretrained.
# One would expect it to be saved, or never to be. It is if the tokenizer's last call padded, and lost if it did not or there was none:
# a call leaves its padding in the backend, which writes it to tokenizer.json, where the next loading finds the side.
# truncation_side goes the same way with calls that truncate; model_max_length is always kept. As arguments of from_pretrained, both last.
# Seen: left when saved; right, left and right again when loaded, after no call, one that pads and one that does not.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cat >"$work/look.py" <<'PYTHON'
"""Save a tokenizer that pads and truncates on the left, after several calls, and print what is loaded."""
import sys

from tokenizers import Tokenizer, models
from transformers import AutoTokenizer, PreTrainedTokenizerFast

words = Tokenizer(models.WordLevel({"<pad>": 0, "a": 1}))
PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", model_max_length=8).save_pretrained(sys.argv[1])


def show(when, tokenizer):
    tokenizer.save_pretrained(sys.argv[1] + "/again")
    loaded = AutoTokenizer.from_pretrained(sys.argv[1] + "/again")
    row = loaded("a", padding="max_length", max_length=3).input_ids
    print(f"{when}: padding {loaded.padding_side}, truncation {loaded.truncation_side}, length {loaded.model_max_length}, {row}")


tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
tokenizer.padding_side = tokenizer.truncation_side = "left"
tokenizer.model_max_length = 5
show("attributes, no call", tokenizer)
tokenizer("a", padding=True)
show("attributes, the last call pads", tokenizer)
tokenizer("a", truncation=True)
show("attributes, the last call truncates", tokenizer)
tokenizer("a")
show("attributes, the last call does neither", tokenizer)
show("arguments, no call", AutoTokenizer.from_pretrained(sys.argv[1], padding_side="left", truncation_side="left"))
PYTHON
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --disable-pip-version-check transformers==5.23.0
"$work/venv/bin/python" "$work/look.py" "$work" 2>/dev/null | tee "$work/seen"
diff "$work/seen" - <<'EXPECTED'
attributes, no call: padding right, truncation right, length 5, [1, 0, 0]
attributes, the last call pads: padding left, truncation right, length 5, [0, 0, 1]
attributes, the last call truncates: padding right, truncation left, length 5, [1, 0, 0]
attributes, the last call does neither: padding right, truncation right, length 5, [1, 0, 0]
arguments, no call: padding left, truncation left, length 8, [0, 0, 1]
EXPECTED
