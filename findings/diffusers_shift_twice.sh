#!/usr/bin/env bash
# diffusers 0.42.1, FlowMatchEulerDiscreteScheduler(shift=3): the same grid by two of its own ways.
# One would expect set_timesteps(1000) to give the constructor's 1000 sigmas again, and set_timesteps(4) what pipelines run, who pass
# sigmas of 1, .75, .5, .25. The constructor remembers its last sigma after the shift, set_timesteps spreads steps down to that one
# and shifts again: the last step is near 0 instead of at .5, and training sigmas by set_timesteps(1000) end three times too high.
# Seen: last of 1000 .0030 by the constructor, .0089 by set_timesteps; 1, .858, .602, .009 against 1, .9, .75, .5.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cat >"$work/look.py" <<'PYTHON'
"""Print the sigmas by the constructor, by a number of steps, and by the sigmas that pipelines pass."""
from diffusers import FlowMatchEulerDiscreteScheduler


def show(name, sigmas, digits=3):
    print(name, [round(value, digits) for value in sigmas.tolist()])


for shift in (1.0, 3.0):
    scheduler = FlowMatchEulerDiscreteScheduler(shift=shift)
    show(f"shift {shift}: last by the constructor", scheduler.sigmas[-1:], 4)
    scheduler.set_timesteps(1000)
    show(f"shift {shift}: last by set_timesteps(1000)", scheduler.sigmas[-2:-1], 4)
    scheduler.set_timesteps(4)
    show(f"shift {shift}: set_timesteps(4)", scheduler.sigmas[:-1])
    scheduler.set_timesteps(sigmas=[1.0, 0.75, 0.5, 0.25])
    show(f"shift {shift}: as pipelines call it", scheduler.sigmas[:-1])
PYTHON
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 diffusers==0.42.1
"$work/venv/bin/python" "$work/look.py" | tee "$work/seen"
diff "$work/seen" - <<'EXPECTED'
shift 1.0: last by the constructor [0.001]
shift 1.0: last by set_timesteps(1000) [0.001]
shift 1.0: set_timesteps(4) [1.0, 0.667, 0.334, 0.001]
shift 1.0: as pipelines call it [1.0, 0.75, 0.5, 0.25]
shift 3.0: last by the constructor [0.003]
shift 3.0: last by set_timesteps(1000) [0.0089]
shift 3.0: set_timesteps(4) [1.0, 0.858, 0.602, 0.009]
shift 3.0: as pipelines call it [1.0, 0.9, 0.75, 0.5]
EXPECTED
