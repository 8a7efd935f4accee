#!/usr/bin/env bash
# Write the locks again (make lock): uv resolves pyproject.toml for every platform and Python, keeps the versions that still fit, and notes the
# hashes of all their files on PyPI. Another version: bash tools/lock.sh --upgrade-package NAME. requirements-torch-cpu.lock is written by hand.
set -euo pipefail
cd "$(dirname "$0")/.."
names() { sed -nE 's/^([a-zA-Z0-9._-]+)===?.*/--no-emit-package \1/p' "$1"; }
compile() { # compile LOCK INPUTS...
  lock=$1; shift
  .cache/tools/bin/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-annotate \
    --custom-compile-command "make lock" --output-file "$lock" "$@"
}
compile requirements-build.lock <(echo setuptools) "$@" # what the one package without a wheel is built with
# === takes no other build of a version, but uv keeps only versions that stand after ==
sed -i -E 's/^(torch|torchvision)===/\1==/' requirements-torch.lock
compile requirements-torch.lock <(printf 'torch\ntorchvision\n') --constraint requirements.lock \
  $(names requirements.lock) $(names requirements-build.lock) "$@"
sed -i -E 's/^(torch|torchvision)==/\1===/' requirements-torch.lock
extras=$(sed -n '/^\[project.optional-dependencies\]/,/^$/{s/^\([a-z]*\) = .*/--extra \1/p}' pyproject.toml | grep -v parity)
compile requirements.lock pyproject.toml $extras --group tried --constraint requirements-torch.lock --constraint requirements-build.lock \
  $(names requirements-torch.lock) $(names requirements-build.lock) "$@"
compile requirements-parity.lock requirements-parity.lock --no-deps "$@"
compile requirements-tools.lock <(printf 'uv\ncyclonedx-bom\n') "$@"
