#!/usr/bin/env bash
# dvc 3.67.1, `dvc repro`: which stages come back from the run cache after outputs and dvc.lock were lost.
# One would expect: every stage that has run, and that outputs with `cache: false` are never copied into DVC's cache.
# A metric with `cache: false` is copied there and its stage comes back; one other output with `cache: false`, or with `persist: true`,
# makes the whole stage run again, and the cached outputs beside it with it. `dvc commit` afterwards puts the former in.
# Seen: plain, metric -> restored; kept, mixed, persisted -> run again; kept after `dvc commit` -> restored.
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
  plain: {cmd: echo plain > plain, deps: [input], outs: [plain]}
  metric: {cmd: echo 1 > metric.yaml, deps: [input], metrics: [metric.yaml: {cache: false}]}
  kept: {cmd: echo kept > kept, deps: [input], outs: [kept: {cache: false}]}
  mixed: {cmd: echo mixed | tee mixed > beside, deps: [input], outs: [mixed, beside: {cache: false}]}
  persisted: {cmd: echo persisted > persisted, deps: [input], outs: [persisted: {persist: true}]}
YAML
lose_and_repeat() {  # NAME FILE...
  rm -f "${@:2}" dvc.lock
  found=$(dvc repro --single-item "$1" 2>&1 | grep -oE "^Running|is cached" | sed "s/Running/run again/; s/is cached/restored/")
  echo "$1: $found" | tee -a "$work/seen"
}
dvc repro --quiet
copied=$(find .dvc/cache/files -type f -exec grep -lx 1 {} + | wc -l)
echo "copies of metric.yaml, which has cache: false, in DVC's cache: $copied" | tee -a "$work/seen"
lose_and_repeat plain plain
lose_and_repeat metric metric.yaml
lose_and_repeat kept kept
lose_and_repeat mixed mixed beside
lose_and_repeat persisted persisted
dvc repro --quiet --single-item kept && dvc commit --quiet --force kept
echo "after dvc commit" | tee -a "$work/seen"
lose_and_repeat kept kept
diff "$work/seen" - <<'EXPECTED'
copies of metric.yaml, which has cache: false, in DVC's cache: 1
plain: restored
metric: restored
kept: run again
mixed: run again
persisted: run again
after dvc commit
kept: restored
EXPECTED
