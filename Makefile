# The two commands: `make reproduce` makes the comparison report from nothing, `make test` runs the tests. `make help` lists all.
# The Python and the build of torch that `make env` was last told, if any
-include .cache/environments/choice.mk
PYTHON ?= python3
# auto, cpu, cu126 or another of PyTorch's builds, or pip for the one that pip finds
TORCH ?= auto
TOOLS := .cache/tools/bin
BIN := .venv/bin
# glibc fills new memory, so that code that reads what nobody wrote computes with huge numbers in every run.
FILLED := MALLOC_PERTURB_=1
# Tests of a file stay together because they share fixtures, and the longest files start first (tests/conftest.py). One worker per core.
PYTEST := $(FILLED) $(BIN)/python -m pytest --maxprocesses 4 --dist loadfile --no-loadscope-reorder
# Slow tests often wait, for servers and for processes that they started: one worker more
MORE := $$(($$(getconf _NPROCESSORS_ONLN) + 1))
export DVC_NO_ANALYTICS = 1
export DO_NOT_TRACK = 1
export NO_MKDOCS_2_WARNING = 1

.PHONY: help env has-env reproduce vouch verify compare gpu-first check lint fast format docs docs-serve rehearse test test-slow lock bom clean

help: ## list the targets, and the first things to try
	@grep -hE '^[a-z-]+:.*## ' Makefile | sed -E 's/:.*## /\t/' | while IFS="$$(printf '\t')" read -r name text; do printf 'make %-13s %s\n' "$$name" "$$text"; done
	@echo; echo 'First things to try:'
	@sed -nE 's/^\| ([a-z][^|]{3,}) \| ([^|]*) \|$$/\1: \2/p' README.md | sed -E 's/ \(\[[^)]*\)\)//g; s/\[([^]]*)\]\([^)]*\)/\1/g; s/`//g'

env: ## build the environment .venv, if it is not the pinned one; the old one stays until then. PYTHON=python3.12 and TORCH=cpu or cu126 choose, and are kept
	@PYTHON='$(PYTHON)' TORCH='$(TORCH)' $(PYTHON) -m tools.environment build

has-env:
	@TORCH='$(TORCH)' $(PYTHON) -m tools.environment check

reproduce: env ## from nothing to reports/report.html: installs, then runs the whole pipeline
	$(BIN)/python -m pipeline.check
	$(BIN)/python -m pipeline.reproduce
	@echo "report: $(CURDIR)/reports/report.html"

vouch: has-env ## give changed code that computes the same bits the version that it had (90 s); NEW="train" names stages that compute others
	@NEW='$(NEW)' UNTRIED='$(UNTRIED)' BASELINE='$(BASELINE)' $(BIN)/python -m tools.vouch

verify: has-env ## compare the outputs of this checkout with the committed ones: which differ, and by how much
	@$(BIN)/python -m pipeline.verify

compare: env ## the study `compare`: every method, two sets of rewards, three seeds (an hour on two cores)
	$(BIN)/python -m pipeline.check
	$(BIN)/python -m studies run compare

gpu-first: has-env ## what a machine with a GPU should tell first: rounding, memory, speed and bits of FLUX.1-dev's shape, in one table (random weights)
	@$(BIN)/python -m benchmarks.gpu_first

check: lint fast ## before every commit: format, lint, types, import contracts, spelling, fast tests (5 minutes on two cores; -j2 does both at once)

lint: has-env
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports --no-cache
	$(BIN)/mypy
	git ls-files -z | xargs -0 $(BIN)/codespell

fast: has-env
	$(PYTEST) -n auto -m "not pipeline and not slow"

format: has-env ## format the code, and fix what the linter can
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

docs: has-env ## build the documents as a site, site/index.html; needs no network and no server
	$(BIN)/python -m mkdocs --quiet build --strict
	@echo "documents: $(CURDIR)/site/index.html"

docs-serve: has-env ## serve the same at http://127.0.0.1:8000, rebuilt at every change
	$(BIN)/python -m mkdocs serve

rehearse: env ## every profile of published models at true size on simulated GPUs, as its comment says (minutes each)
	@grep -hoE 'g2rpo rehearse --profile [^`]*' profiles/*.yaml | while read -r line; do $(BIN)/$$line || exit 1; done

test: env ## all tests except the slow ones
	$(PYTEST) -n auto -m "not slow"

test-slow: env ## kills, load, rehearsals, long draws of generated inputs
	$(PYTEST) -n $(MORE) -m slow

lock: $(TOOLS)/ready ## resolve the locks again, with the hashes of all files; a version stays while it fits
	@bash tools/lock.sh

bom: env $(TOOLS)/ready ## write what is installed as bom.json, a bill of materials (CycloneDX)
	@$(TOOLS)/cyclonedx-py environment --pyproject pyproject.toml --output-reproducible --output-file bom.json .venv/bin/python

# uv and cyclonedx-py, in an environment of their own: their packages are not those of the code
$(TOOLS)/ready: requirements-tools.lock
	@rm -rf .cache/tools && $(PYTHON) -m venv .cache/tools
	@$(TOOLS)/python -m pip install --quiet --disable-pip-version-check --no-deps --require-hashes -r requirements-tools.lock && touch $@

clean: ## remove the environment, models, prompts, embeddings and runs; CONFIRM=1 also those runs that are in no cache
	@CONFIRM=$(CONFIRM) $(PYTHON) -m tools.clean
