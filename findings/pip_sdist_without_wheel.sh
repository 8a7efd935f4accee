#!/usr/bin/env bash
# pip 23.0.1 (Debian 12's) and 23.1, with setuptools 66.1.1: `pip install` of an sdist that has a setup.py and no pyproject.toml.
# One would expect: the same installation by both, as far as an option does not ask otherwise, and whatever else is installed.
# 23.0.1 looks whether the package `wheel` happens to be there, which a new venv has not. If not, it runs `setup.py install`: no
# .dist-info, no RECORD with hashes, no note of the installer; what copies or checks an environment by these lists finds nothing.
# Seen: 23.0.1 -> egg-info, no RECORD; with wheel 0.38.4, and 23.1 without it -> dist-info with RECORD.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$work/small-1.0"
echo 'from setuptools import setup; setup(name="small", version="1.0", py_modules=["small"])' >"$work/small-1.0/setup.py"
echo 'VALUE = 1' >"$work/small-1.0/small.py"
printf 'Metadata-Version: 2.1\nName: small\nVersion: 1.0\n' >"$work/small-1.0/PKG-INFO"
tar -czf "$work/small-1.0.tar.gz" -C "$work" small-1.0
try() {  # LABEL PACKAGE...
  python3 -m venv --clear "$work/venv"
  "$work/venv/bin/pip" uninstall --quiet --yes wheel 2>/dev/null
  "$work/venv/bin/python" -m pip install --quiet --disable-pip-version-check "${@:2}"
  "$work/venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-cache-dir "$work/small-1.0.tar.gz" 2>"$work/said"
  "$work/venv/bin/python" - "$1" <<'PYTHON' | tee -a "$work/seen"
import importlib.metadata, sys

found = importlib.metadata.distribution("small")
form = "dist-info" if found.read_text("RECORD") else "egg-info" if found.read_text("installed-files.txt") else "other"
print(f"{sys.argv[1]}: {form}, RECORD", "yes," if found.read_text("RECORD") else "none,", "INSTALLER", found.read_text("INSTALLER") and "pip" or "none")
PYTHON
}
try "pip 23.0.1" pip==23.0.1 setuptools==66.1.1
try "pip 23.0.1 with wheel" pip==23.0.1 setuptools==66.1.1 wheel==0.38.4
try "pip 23.1" pip==23.1 setuptools==66.1.1
diff "$work/seen" - <<'EXPECTED'
pip 23.0.1: egg-info, RECORD none, INSTALLER none
pip 23.0.1 with wheel: dist-info, RECORD yes, INSTALLER pip
pip 23.1: dist-info, RECORD yes, INSTALLER pip
EXPECTED
