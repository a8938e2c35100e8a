# A fresh machine needs python3 (3.11), make and a package index. Options for pip: make setup PIP_OPTIONS="--index-url https://..."
PYTHON ?= python3
PIP_OPTIONS ?=
WORKERS ?= 2
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: setup quickstart test test-slow lint type clean

setup: $(STAMP)

# torch comes first and is pinned in every call: otherwise another package may pull a build for GPUs.
$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet $(PIP_OPTIONS) --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet $(PIP_OPTIONS) --constraint constraints.txt --editable '.[dev]'
	touch $@

quickstart: setup
	$(BIN)/oat quickstart

PYTEST := OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(BIN)/python -m pytest -n $(WORKERS)

# The tests of whole runs go through the wire encoding first; then everything.
test: lint type
	$(PYTEST) -m "not slow" --serialise tests/faults tests/golden tests/learning tests/protocol
	$(PYTEST) -m "not slow" --durations=10

test-slow: setup
	$(PYTEST) -m slow --durations=10

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

type: setup
	$(BIN)/mypy

clean:
	rm -rf $(VENV) build *.egg-info src/*.egg-info
