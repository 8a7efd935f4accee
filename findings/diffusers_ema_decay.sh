#!/usr/bin/env bash
# diffusers 0.42.1, EMAModel(parameters, decay=.9999, use_ema_warmup=False): "the decay factor for the exponential moving average".
# One would expect .9999 from the first step, as no warm-up is asked for. The decay is at most (1 + step) / (10 + step), which takes
# 90,000 steps to reach .9999: after 100 steps it is .917, an average over 12 steps and not over 10,000. The first step copies the
# weights whatever is set. min_decay=.9999 brings a constant decay from the second step on.
# Seen: decays 0, .182, .25 at steps 1 to 3, .917 at 100, .991 at 1,000; with min_decay 0, then .9999.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cat >"$work/look.py" <<'PYTHON'
"""Print the decay of an average at some steps, and what is left of its first value."""
import torch
from diffusers.training_utils import EMAModel

for settings in ({"use_ema_warmup": False}, {"use_ema_warmup": False, "min_decay": 0.9999}):
    weight = torch.nn.Parameter(torch.zeros(1))
    average = EMAModel([weight], decay=0.9999, **settings)
    torch.nn.init.ones_(weight)
    decays = {}
    for step in range(1, 1001):
        average.step([weight])
        if step == 1:
            print(settings, "- average of 0 and 1 after one step:", average.shadow_params[0].item())
        if step in (1, 2, 3, 100, 1000):
            decays[step] = round(average.cur_decay_value, 4)
    print(settings, "- decays:", decays)
PYTHON
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 diffusers==0.42.1 transformers==5.23.0
"$work/venv/bin/python" "$work/look.py" 2>/dev/null | tee "$work/seen"
diff "$work/seen" - <<'EXPECTED'
{'use_ema_warmup': False} - average of 0 and 1 after one step: 1.0
{'use_ema_warmup': False} - decays: {1: 0.0, 2: 0.1818, 3: 0.25, 100: 0.9174, 1000: 0.9911}
{'use_ema_warmup': False, 'min_decay': 0.9999} - average of 0 and 1 after one step: 1.0
{'use_ema_warmup': False, 'min_decay': 0.9999} - decays: {1: 0.0, 2: 0.9999, 3: 0.9999, 100: 0.9999, 1000: 0.9999}
EXPECTED
