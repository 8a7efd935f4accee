#!/usr/bin/env bash
# diffusers 0.42.1, FlowMatchEulerDiscreteScheduler.scale_noise(sample, timestep, noise): "forward process in flow-matching".
# One would expect each row to be noised as its own timestep says. That holds until set_begin_index has been called, which pipelines
# do; from then on timestep is used for its length only, and all rows get the noise of the step where the scheduler stands. Whoever
# samples with a scheduler and then noises images with it, to train or to compare, trains at one wrong noise level. No word.
# Seen for timesteps 0 and 5 of 8: 1.0 and .548 at first; 1.0 for both after set_begin_index(0); .801 for both three steps later.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cat >"$work/look.py" <<'PYTHON'
"""Print the share of noise in two rows that ask for two timesteps."""
import torch
from diffusers import FlowMatchEulerDiscreteScheduler

scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
scheduler.set_timesteps(8)
image, noise = torch.zeros(2, 1), torch.ones(2, 1)


def look(when):
    noised = scheduler.scale_noise(image, scheduler.timesteps[[0, 5]], noise)
    print(when, [round(value, 3) for value in noised.flatten().tolist()])


look("at first:")
scheduler.set_begin_index(0)
look("after set_begin_index(0):")
for timestep in scheduler.timesteps[:3]:
    scheduler.step(noise, timestep, image)
look("after three steps:")
print("asked for:", [round(value, 3) for value in scheduler.sigmas[[0, 5]].tolist()])
PYTHON
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 diffusers==0.42.1
"$work/venv/bin/python" "$work/look.py" | tee "$work/seen"
diff "$work/seen" - <<'EXPECTED'
at first: [1.0, 0.548]
after set_begin_index(0): [1.0, 1.0]
after three steps: [0.801, 0.801]
asked for: [1.0, 0.548]
EXPECTED
