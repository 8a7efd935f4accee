#!/usr/bin/env bash
# dvc 3.67.1, `params: [KEY]` of a stage in dvc.yaml, where the key has [, ], * or ? in its own name.
# One would expect: the key is looked up as it is written; if anything in it is special, the dots.
# The key is a pattern. "rate[0]" means a key "rate0": without one, "rate[0]" is missing from the file that has it; with one, the stage
# depends on rate0 under the name rate[0], and an edit of rate[0] goes unseen. "a*" takes the one key that fits.
# Seen: alone -> missing; beside rate0: 9 -> dvc.lock has rate[0]: 9, and its edit leaves the stage up to date.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --disable-pip-version-check dvc==3.67.1
export PATH="$work/venv/bin:$PATH" DVC_NO_ANALYTICS=1 DVC_SITE_CACHE_DIR="$work/site" DVC_GLOBAL_CONFIG_DIR="$work/global"
mkdir "$work/project" && cd "$work/project"
dvc init --quiet --no-scm
cat >dvc.yaml <<'YAML'
stages:
  train: {cmd: cp params.yaml out, params: ["rate[0]"], outs: [out]}
YAML
echo '"rate[0]": 1' >params.yaml
{ dvc repro 2>&1 || true; } | grep -o "Parameters .* are missing from .*" | tee -a "$work/seen"
echo 'rate0: 9' >>params.yaml
dvc repro --quiet
echo "dvc.lock: $(grep -F 'rate[0]:' dvc.lock | xargs)" | tee -a "$work/seen"
sed -i 's/"rate\[0\]": 1/"rate[0]": 2/' params.yaml
echo "rate[0] edited: $(dvc status)" | tee -a "$work/seen"
sed -i 's/rate0: 9/rate0: 8/' params.yaml
echo "rate0 edited: $(dvc status | tail -1 | xargs)" | tee -a "$work/seen"
diff "$work/seen" - <<'EXPECTED'
Parameters 'rate[0]' are missing from 'params.yaml'.
dvc.lock: rate[0]: 9
rate[0] edited: Data and pipelines are up to date.
rate0 edited: modified: rate[0]
EXPECTED
