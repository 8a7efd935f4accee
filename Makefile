# The two commands: `make reproduce` makes the comparison report from nothing, `make test` runs every test.
# `make compare` trains and compares every method with three seeds (studies/compare): under 90 minutes on two cores.
PYTHON ?= python3
BIN := .venv/bin
export DVC_NO_ANALYTICS = 1
export DO_NOT_TRACK = 1

.PHONY: reproduce compare test clean

reproduce: .venv/ready
	$(BIN)/python -m stages.check
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/dvc repro
	@echo "report: $(CURDIR)/reports/report.html"

compare: .venv/ready
	$(BIN)/python -m stages.check
	$(BIN)/python -m studies compare

test: .venv/ready
	$(BIN)/python -m pytest

# torch comes first: alone, its release for this machine is chosen; then everything at its pinned version.
# Last the published scorers that tests compare with: their own pins cannot be met together, so nothing of theirs is resolved.
.venv/ready: requirements.lock requirements-parity.lock tools/fit_torchvision.py pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "error: Python 3.11 or newer is needed, this is " + sys.version.split()[0] + "; name another with: make PYTHON=python3.11")'
	$(PYTHON) -m venv --clear .venv
	$(BIN)/python -m pip install --quiet "$$(grep '^torch==' requirements.lock)"
	$(BIN)/python -m pip install --quiet -r requirements.lock
	$(BIN)/python -m pip install --quiet --no-deps -r requirements-parity.lock
	$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation -e .
	$(BIN)/python tools/fit_torchvision.py
	@touch $@

clean:
	rm -rf .venv .cache/resume models prompts embeddings runs evaluations studies/*/runs studies/*/evaluations
