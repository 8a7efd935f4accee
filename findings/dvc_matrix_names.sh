#!/usr/bin/env bash
# dvc 3.67.1, a stage with `matrix:` in dvc.yaml: combinations whose values join to the same name.
# One would expect: a stage for each combination, or an error about a name that is there twice.
# A stage is named by its values with "-" between them. model sd3 with turbo-8, and model sd3-turbo with 8, are both train@sd3-turbo-8:
# the later one takes the place of the earlier, which is in no list, is never run, and is missed by no check.
# Seen: 4 combinations -> 3 stages; `dvc repro` runs 3, `dvc status` is clean.
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
  train:
    matrix: {model: [sd3, sd3-turbo], steps: [turbo-8, "8"]}
    cmd: echo "model ${item.model}, steps ${item.steps}" > ${item.model}_${item.steps}
    outs: ["${item.model}_${item.steps}"]
YAML
dvc stage list --name-only | tee -a "$work/seen"
dvc repro --quiet
cat sd3* | LC_ALL=C sort | tee -a "$work/seen"
dvc status | tee -a "$work/seen"
diff "$work/seen" - <<'EXPECTED'
train@sd3-turbo-8
train@sd3-8
train@sd3-turbo-turbo-8
model sd3, steps 8
model sd3-turbo, steps 8
model sd3-turbo, steps turbo-8
Data and pipelines are up to date.
EXPECTED
