#!/usr/bin/env bash
# diffusers 0.42.1 with transformers 5.23.0: DiffusionPipeline.from_pretrained of a bfloat16 folder without a dtype.
# One would expect one dtype for all parts: float32, as of old, or the files'. diffusers reads its own parts as float32 whatever the
# file holds; transformers 5 reads its parts in the file's dtype. Such a pipeline cannot draw: its parts do not fit each other.
# Seen: VAE and transformer float32, both text encoders bfloat16, and a RuntimeError at the first prompt; the pipeline that was
# saved draws.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cat >"$work/look.py" <<'PYTHON'
"""Save a small FLUX pipeline in bfloat16, load it, and print the parts' dtypes."""
import sys

import torch
from diffusers import AutoencoderKL, DiffusionPipeline, FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel
from tokenizers import Tokenizer, models
from transformers import CLIPTextConfig, CLIPTextModel, PreTrainedTokenizerFast, T5Config, T5EncoderModel

words = Tokenizer(models.WordLevel({"<pad>": 0, "<unk>": 1}, unk_token="<unk>"))
tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", unk_token="<unk>", model_max_length=8)
one = {"vocab_size": 8, "bos_token_id": 0, "eos_token_id": 1}
clip = CLIPTextConfig(**one, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
t5 = T5Config(vocab_size=8, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, feed_forward_proj="gated-gelu")
heads = {"num_layers": 1, "num_single_layers": 1, "attention_head_dim": 8, "num_attention_heads": 2, "axes_dims_rope": (2, 2, 4)}
saved = FluxPipeline(
    scheduler=FlowMatchEulerDiscreteScheduler(),
    vae=AutoencoderKL(block_out_channels=(32,), latent_channels=1),
    text_encoder=CLIPTextModel(clip),
    tokenizer=tokenizer,
    text_encoder_2=T5EncoderModel(t5),
    tokenizer_2=tokenizer,
    transformer=FluxTransformer2DModel(in_channels=4, joint_attention_dim=16, pooled_projection_dim=16, **heads),
).to(torch.bfloat16)
saved.save_pretrained(sys.argv[1])
loaded = DiffusionPipeline.from_pretrained(sys.argv[1])
for name, pipeline in {"saved": saved, "loaded": loaded}.items():
    parts = {part: str(value.dtype) for part, value in pipeline.components.items() if isinstance(value, torch.nn.Module)}
    print(name, *(f"{part}={parts[part].removeprefix('torch.')}" for part in sorted(parts)))
    try:
        pipeline("a", height=16, width=16, num_inference_steps=1, max_sequence_length=8, output_type="latent")
        print(name, "draws")
    except RuntimeError:
        print(name, "RuntimeError")
PYTHON
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 diffusers==0.42.1 transformers==5.23.0 accelerate==1.15.0
"$work/venv/bin/python" "$work/look.py" "$work/pipeline" 2>/dev/null | tee "$work/seen"
diff "$work/seen" - <<'EXPECTED'
saved text_encoder=bfloat16 text_encoder_2=bfloat16 transformer=bfloat16 vae=bfloat16
saved draws
loaded text_encoder=bfloat16 text_encoder_2=bfloat16 transformer=float32 vae=float32
loaded RuntimeError
EXPECTED
