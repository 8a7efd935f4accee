#!/usr/bin/env bash
# torch 2.13.0, torch.distributed.checkpoint: plain values (counters, histories) in dictionaries of a training state.
# One would expect what was saved, or an error as for a missing tensor. Keys become strings: under an integer key the old value stays
# and the saved one is put beside it under a string. And only keys are read that the dictionary already has: what a fresh trainer has
# not counted yet is left out. Lists of numbers come back whole; a list with a tensor in it is cut to the length it has.
# Seen: {1: 2} loaded into {1: 0} gives {1: 0, '1': 2}; {'a': 1, 'b': 2} into {'a': 0} gives {'a': 1}, into {} gives {}.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cat >"$work/look.py" <<'PYTHON'
"""Save a state, load it into another one of the same form, and print that."""
import tempfile

import torch
import torch.distributed.checkpoint as dcp


def look(saved, fresh):
    state = {"state": fresh}
    with tempfile.TemporaryDirectory() as folder:
        dcp.save({"state": saved}, checkpoint_id=folder, no_dist=True)
        before = str(fresh)
        dcp.load(state, checkpoint_id=folder, no_dist=True)
    print(saved, "loaded into", before, "gives", state["state"])


look({1: 2}, {1: 0})
look({"a": 1, "b": 2}, {"a": 0})
look({"a": 1, "b": 2}, {})
look([1, 2, 3], [])
look([torch.ones(()), 2, 3], [torch.zeros(())])
PYTHON
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 numpy==2.4.6
"$work/venv/bin/python" "$work/look.py" 2>/dev/null | tee "$work/seen"
diff "$work/seen" - <<'EXPECTED'
{1: 2} loaded into {1: 0} gives {1: 0, '1': 2}
{'a': 1, 'b': 2} loaded into {'a': 0} gives {'a': 1}
{'a': 1, 'b': 2} loaded into {} gives {}
[1, 2, 3] loaded into [] gives [1, 2, 3]
[tensor(1.), 2, 3] loaded into [tensor(0.)] gives [tensor(1.)]
EXPECTED
