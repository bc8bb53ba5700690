# Every target that needs the environment sets it up first; a second call reinstalls nothing.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
TOOLS := $(VENV)/.ready-dev
OUT ?= runs/demo
# Declares torchvision by way of a package that it does not import: installed without dependencies.
WITNESS := curvlinops-for-pytorch einconv einops linear_operator opt_einsum

.DEFAULT_GOAL := help
.PHONY: help demo test lint bench docs clean

help:  ## list the targets
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | awk -F':.*## ' '{printf "  make %-8s %s\n", $$1, $$2}'

demo: $(READY)  ## plain replay against LPR on bundled data: a table and a picture
	$(BIN)/proxreplay demo --out $(OUT)

test: export OMP_NUM_THREADS = 1  # the tests run in as many processes as there are cores
test: lint  ## lint, type-check, import contract and all tests
	$(BIN)/python -m pytest -n auto

lint: $(TOOLS)  ## ruff, mypy (strict) and the import contract
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(READY)  ## speed: each fast path against its naive twin, as ratios within one run
	$(BIN)/python -m benchmarks

docs: $(TOOLS)  ## the docs as a site, links checked; opens from docs/_build/index.html
	$(BIN)/python -m sphinx -q -W --keep-going -b html docs docs/_build

clean:  ## remove the environment and what the tools left behind
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# What users need; `make demo` installs nothing else.
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "proxreplay needs Python 3.11 or newer; name one with: make PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt "torch==2.13.0"
	$(BIN)/pip install --quiet --constraint constraints.txt --editable .
	touch $@

# Linters, test tools and trackers beside it.
$(TOOLS): $(READY)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable ".[dev]"
	$(BIN)/pip install --quiet --constraint constraints.txt --no-deps $(WITNESS)
	touch $@
