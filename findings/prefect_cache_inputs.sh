#!/usr/bin/env bash
# prefect 3.8.8, tasks with `cache_policy=INPUTS` and `persist_result=True`: which inputs have the same key.
# One would expect: inputs that Python tells apart have keys of their own, and equal inputs have equal keys, today and tomorrow.
# The key is a hash of the inputs as JSON: {1: ...} is {"1": ...} and a tuple is a list, so that a task gets the result of another call.
# What JSON does not know is pickled: a set of texts comes in another order in each process, and is looked up in vain.
# Seen: {1: 2}, {"1": 2} -> the second gets the first's result; (1, 2), [1, 2] likewise; the same set in two processes -> made twice.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cat >"$work/look.py" <<'PYTHON'
"""Call one task with the inputs that are named, and print what it returns."""
import sys
from prefect import flow, task
from prefect.cache_policies import INPUTS

CALLS = {"int key": {1: 2}, "str key": {"1": 2}, "tuple": (1, 2), "list": [1, 2], "set": {"hps", "clip", "ocr", "pick", "image_reward"}}


@task(cache_policy=INPUTS, persist_result=True)
def describe(value):
    print("  the task runs", flush=True)
    return type(next(iter(value))).__name__ + " in a " + type(value).__name__


@flow
def look(names: list[str]):
    for name in names:
        print(f"{name}:", flush=True)
        print(" ", describe(CALLS[name]), flush=True)


look(sys.argv[1:])
PYTHON
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --disable-pip-version-check prefect==3.8.8 fastapi==0.150.0 sqlalchemy==2.0.57
export PREFECT_HOME="$work/prefect" PREFECT_SERVER_ANALYTICS_ENABLED=false DO_NOT_TRACK=1 PREFECT_LOGGING_LEVEL=ERROR
export PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS=120
for seed in 1 2; do
  PYTHONHASHSEED=$seed "$work/venv/bin/python" "$work/look.py" "int key" "str key" tuple list set >"$work/run" 2>"$work/log" || { cat "$work/log"; exit 1; }
  echo "process $seed" >>"$work/seen"
  cat "$work/run" >>"$work/seen"
done
cat "$work/seen"
diff "$work/seen" - <<'EXPECTED'
process 1
int key:
  the task runs
  int in a dict
str key:
  int in a dict
tuple:
  the task runs
  int in a tuple
list:
  int in a tuple
set:
  the task runs
  str in a set
process 2
int key:
  int in a dict
str key:
  int in a dict
tuple:
  int in a tuple
list:
  int in a tuple
set:
  the task runs
  str in a set
EXPECTED
