# The two commands: `make reproduce` makes the comparison report from nothing, `make test` runs the tests. `make help` lists all.
PYTHON ?= python3
BIN := .venv/bin
# One worker per core; tests of a file stay together because they share fixtures.
PYTEST := $(BIN)/python -m pytest -n auto --maxprocesses 4 --dist loadfile
export DVC_NO_ANALYTICS = 1
export DO_NOT_TRACK = 1
export NO_MKDOCS_2_WARNING = 1

.PHONY: help reproduce verify compare check format docs docs-serve rehearse test test-slow test-rest clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' Makefile | sed -E 's/:.*## /\t/' | while IFS="$$(printf '\t')" read -r name text; do printf 'make %-10s %s\n' "$$name" "$$text"; done

reproduce: .venv/ready ## from nothing to reports/report.html: installs, then runs the whole pipeline
	$(BIN)/python -m stages.check
	$(BIN)/python -m stages.reproduce
	@echo "report: $(CURDIR)/reports/report.html"

verify: .venv/ready ## compare the outputs of this checkout with the committed dvc.lock
	@$(BIN)/python -m stages.verify

compare: .venv/ready ## the study `compare`: every method, two sets of rewards, three seeds (an hour on two cores)
	$(BIN)/python -m stages.check
	$(BIN)/python -m studies run compare

check: .venv/ready ## before every commit: format, lint, types, import contracts, fast tests (under 2 minutes)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports --no-cache
	$(BIN)/mypy
	$(PYTEST) -m "not pipeline and not slow"

format: .venv/ready ## format the code, and fix what the linter can
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

docs: .venv/ready ## build the documents as a site, site/index.html; needs no network and no server
	$(BIN)/python -m mkdocs --quiet build --strict
	@echo "documents: $(CURDIR)/site/index.html"

docs-serve: .venv/ready ## serve the same at http://127.0.0.1:8000, rebuilt at every change
	$(BIN)/python -m mkdocs serve

rehearse: .venv/ready ## every profile of published models and every method at true size on simulated GPUs, as its comment says (3 minutes each)
	@grep -hoE 'g2rpo rehearse --profile [^`]*' profiles/*.yaml | while read -r line; do $(BIN)/$$line --method all || exit 1; done

test: .venv/ready ## all tests except the slow ones
	$(PYTEST) -m "not slow"

test-slow: .venv/ready ## kills, load, rehearsals, long draws of generated inputs
	$(PYTEST) -m slow

# torch comes first, alone, so that pip chooses its release for this machine; then everything at its pinned version.
# Last come the published scorers that tests compare with: their own pins contradict each other, so they are installed without dependencies.
.venv/ready: requirements.lock requirements-parity.lock tools/fit_torchvision.py tools/activate_environment.py pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "error: Python 3.11 or newer is needed, this is " + sys.version.split()[0] + "; name another with: make PYTHON=python3.11")'
	$(PYTHON) -m venv --clear .venv
	$(BIN)/python -m pip install --quiet "$$(grep '^torch==' requirements.lock)"
	$(BIN)/python -m pip install --quiet -r requirements.lock
	$(BIN)/python -m pip install --quiet --no-deps -r requirements-parity.lock
	$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation -e .
	$(BIN)/python tools/fit_torchvision.py
	$(BIN)/python tools/activate_environment.py
	@touch $@

test-rest: .venv/ready ## everything that `make check` leaves out, in one go
	$(PYTEST) -m "pipeline or slow"

clean: ## removes the environment and everything that the pipeline makes
	rm -rf .venv .cache/resume models prompts published embeddings runs evaluations studies/*/runs studies/*/evaluations
