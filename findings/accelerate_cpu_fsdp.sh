#!/usr/bin/env bash
# accelerate 1.15.0, two CPU processes and a FullyShardedDataParallelPlugin, as one tests sharded training without a GPU.
# One would expect shards (torch's fully_shard works with gloo), or an error. With cpu=True the plugin is dropped and the model wrapped
# in DDP; without cpu=True, where torch sees no GPU, each of torchrun's processes takes itself for the only one and trains alone.
# `accelerate launch --cpu --num_processes 2` starts one process. All this without a word.
# Seen: DDP with whole weights; 1 process in each of two; 1 process in one.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cat >"$work/look.py" <<'PYTHON'
"""Prepare a model and say how it is spread."""
import os
import sys

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin

plugin = FullyShardedDataParallelPlugin(fsdp_version=2) if "plugin" in sys.argv else None
accelerator = Accelerator(cpu=True if "cpu=True" in sys.argv else None, fsdp_plugin=plugin)
model = torch.nn.Linear(8, 8)
prepared = accelerator.prepare(model)
rank, size = os.environ.get("RANK", "none"), model.weight.numel()
print(f"rank {rank} of {accelerator.num_processes}: {type(prepared).__name__}, {size} of 64 numbers in a {type(model.weight).__name__}", flush=True)
PYTHON
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 accelerate==1.15.0
export CUDA_VISIBLE_DEVICES="" HF_HOME="$work" OMP_NUM_THREADS=1
see() {
  echo "$1" | tee -a "$work/seen"
  "$work/venv/bin/${@:2}" 2>/dev/null | sort | tee -a "$work/seen"
}
see "torchrun, plugin, cpu=True" torchrun --standalone --nproc-per-node 2 "$work/look.py" plugin cpu=True
see "torchrun, plugin" torchrun --standalone --nproc-per-node 2 "$work/look.py" plugin
see "accelerate launch" accelerate launch --cpu --num_processes 2 --num_machines 1 --mixed_precision no --dynamo_backend no "$work/look.py"
diff "$work/seen" - <<'EXPECTED'
torchrun, plugin, cpu=True
rank 0 of 2: DistributedDataParallel, 64 of 64 numbers in a Parameter
rank 1 of 2: DistributedDataParallel, 64 of 64 numbers in a Parameter
torchrun, plugin
rank 0 of 1: Linear, 64 of 64 numbers in a Parameter
rank 1 of 1: Linear, 64 of 64 numbers in a Parameter
accelerate launch
rank none of 1: Linear, 64 of 64 numbers in a Parameter
EXPECTED
