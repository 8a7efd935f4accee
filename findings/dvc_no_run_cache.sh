#!/usr/bin/env bash
# dvc 3.67.1, `dvc repro --no-run-cache`: "execute stage commands even if they have already been run" (its help).
# One would expect: delete the output of a random stage, and this draws a new one.
# While dvc.lock still says how the stage last ran, the option is not looked at: the old output comes back from DVC's cache. Only
# without the stage's entry in dvc.lock, or with --force, is the command run.
# Seen: output deleted -> restored; dvc.lock deleted, too -> run; --force -> run.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --disable-pip-version-check dvc==3.67.1
export PATH="$work/venv/bin:$PATH" DVC_NO_ANALYTICS=1 DVC_SITE_CACHE_DIR="$work/site" DVC_GLOBAL_CONFIG_DIR="$work/global"
mkdir "$work/project" && cd "$work/project"
dvc init --quiet --no-scm
echo 1 >input
cat >dvc.yaml <<'YAML'
stages:
  draw: {cmd: echo $RANDOM$RANDOM > drawn && echo run >> ../runs, deps: [input], outs: [drawn]}
YAML
dvc repro --quiet
try() {  # LABEL OPTION
  before=$(wc -l <"$work/runs")
  dvc repro --quiet "$2"
  echo "$1, dvc repro $2: $(($(wc -l <"$work/runs") - before)) run" | tee -a "$work/seen"
}
rm drawn && try "output deleted" --no-run-cache
rm drawn dvc.lock && try "output and dvc.lock deleted" --no-run-cache
rm drawn && try "output deleted" --force
diff "$work/seen" - <<'EXPECTED'
output deleted, dvc repro --no-run-cache: 0 run
output and dvc.lock deleted, dvc repro --no-run-cache: 1 run
output deleted, dvc repro --force: 1 run
EXPECTED
