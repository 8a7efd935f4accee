#!/usr/bin/env bash
# dvc 3.67.1, `dvc repro`: how dvc.lock is written.
# One would expect: into a temporary file that then takes its place, as DVC's cache is written; a kill leaves the old file or the new.
# After each stage the file is emptied, then all of it is made anew and written: a kill in between (the longer the file, the likelier)
# loses the entries of all stages. What is left is called invalid, which does not say what happened or what to do: take dvc.lock from
# git, or remove it and let the run cache give the outputs back.
# Seen: killed while dvc.lock of two finished stages is written -> 0 bytes; `dvc status` -> "'./dvc.lock' validation failed."
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --disable-pip-version-check dvc==3.67.1
export PATH="$work/venv/bin:$PATH" DVC_NO_ANALYTICS=1 DVC_SITE_CACHE_DIR="$work/site" DVC_GLOBAL_CONFIG_DIR="$work/global"
mkdir "$work/project" && cd "$work/project"
dvc init --quiet --no-scm
python -c 'print("names:", *(f"- sample {number} of many" for number in range(2000)), sep="\n")' >params.yaml # long, so that the moment lasts
cat >dvc.yaml <<'YAML'
stages:
  first: {cmd: echo 1 > first, outs: [first]}
  second: {cmd: echo 2 > second, params: [names], outs: [second]}
  third: {cmd: echo 3 > third, deps: [second], outs: [third]}
YAML
dvc repro --quiet first second
echo "stages in dvc.lock: $(grep -cE '^  [a-z]+:$' dvc.lock)" | tee -a "$work/seen"
dvc repro --quiet third &
while [ -s dvc.lock ]; do kill -0 $!; done
kill -KILL $! && wait $! || true
echo "after the kill: $(wc -c <dvc.lock) bytes" | tee -a "$work/seen"
echo "dvc status: $(dvc status 2>&1 | grep -F "dvc.lock")" | tee -a "$work/seen"
diff "$work/seen" - <<'EXPECTED'
stages in dvc.lock: 2
after the kill: 0 bytes
dvc status: './dvc.lock' validation failed.
EXPECTED
