# A fresh machine needs python3 (3.11 to 3.13), make and a package index. Another Python: make test PYTHON=python3.13
# Options for pip: make setup PIP_OPTIONS="--index-url https://..."
PYTHON ?= python3
PIP_OPTIONS ?=
WORKERS ?= 2
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
VERSION := -c 'import platform; print(platform.python_version())'
OLDEST := .venv-oldest
TRACKERS := .venv-trackers
PEERS := .venv-peers
TABLES ?=
ROW ?=
SHORT ?=
MODEL ?=
BASE ?= HEAD
LONG := kill_series losses same_run ten_thousand_steps
WIRED := kill state

.PHONY: setup quickstart test tests affected test-slow faults faults-ray faults-slow bench compare explore lint type clean

setup: $(STAMP)
ifneq ($(origin PYTHON),file)
	@test "$$($(PYTHON) $(VERSION))" = "$$($(BIN)/python $(VERSION))" || \
	{ echo "$(VENV) has Python $$($(BIN)/python $(VERSION)), and PYTHON=$(PYTHON) is $$($(PYTHON) $(VERSION)): run make clean first" >&2; exit 1; }
endif

# torch comes first and is pinned in every call: otherwise another package may pull a build for GPUs.
$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet $(PIP_OPTIONS) --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet $(PIP_OPTIONS) --constraint constraints.txt --editable '.[dev]'
	touch $@

quickstart: setup
	$(BIN)/oat quickstart

# Bytecode is kept, whatever the environment says: otherwise every worker rewrites all assertions, and every cold
# process compiles all of oat.
PYTEST := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder

# Golden runs and runs that are killed go through the wire encoding here, and have plain twins (docs/test_suites.md).
# Types are checked beside the tests, which leave a core idle here and there.
test: lint
	$(MAKE) --no-print-directory --jobs=2 type tests

tests: setup
	$(PYTEST) -m "not slow" --durations=10

# The tests that a change can touch: what differs from HEAD, or from another commit (make affected BASE=main).
affected: setup
	@files=$$($(BIN)/python tests/affected.py $(BASE)) && \
	if [ -n "$$files" ]; then $(PYTEST) -m "not slow" $$files; else echo "nothing differs from $(BASE)"; fi

# All other tests of whole runs through the wire encoding, but for the longest; and slow tests, with the
# transformers of constraints.txt and with the oldest that is supported; and wandb and mlflow, in an environment that
# has them; and TRL's fields, in its own. The large rows of the fault table are `make faults`.
test-slow: setup $(OLDEST)/.installed $(TRACKERS)/.installed $(PEERS)/trl/.installed
	$(PYTEST) -m "not large" -k "not other_seeds" --serialise tests/learning tests/faults $(foreach name,$(LONG) $(WIRED),--ignore=tests/faults/test_$(name).py)
	$(PYTEST) -m "slow and not large" --durations=10
	$(subst $(BIN),$(OLDEST)/bin,$(PYTEST)) -m "slow and not fault"
	$(subst $(BIN),$(TRACKERS)/bin,$(PYTEST)) --durations=10 tests/tracking/test_trackers.py

$(OLDEST)/.installed: pyproject.toml constraints.txt
	test -x $(OLDEST)/bin/python || $(PYTHON) -m venv $(OLDEST)
	sed 's/^transformers==.*/transformers==5.19.0/' constraints.txt > $(OLDEST)/constraints.txt
	$(OLDEST)/bin/python -m pip install --quiet $(PIP_OPTIONS) --constraint $(OLDEST)/constraints.txt torch
	$(OLDEST)/bin/python -m pip install --quiet $(PIP_OPTIONS) --constraint $(OLDEST)/constraints.txt --editable '.[dev]'
	touch $@

$(TRACKERS)/.installed: pyproject.toml constraints.txt
	test -x $(TRACKERS)/bin/python || $(PYTHON) -m venv $(TRACKERS)
	$(TRACKERS)/bin/python -m pip install --quiet $(PIP_OPTIONS) --constraint constraints.txt torch
	$(TRACKERS)/bin/python -m pip install --quiet $(PIP_OPTIONS) --constraint constraints.txt --editable '.[dev,mlflow,wandb]'
	touch $@

# The table of docs/faults.md, row by row, at most 45 minutes; goes on where it was ended. ROW=R1 runs one row anew.
faults: setup
	OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(BIN)/python tests/faults/table.py --workers $(WORKERS) $(ROW)

# The rows of the same table that start Ray clusters, at most 60 minutes.
faults-ray: setup
	OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(BIN)/python tests/faults/table.py --workers $(WORKERS) --ray

# The rows of the same table without a bound of time, test by test; goes on where it was ended.
faults-slow: setup
	OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(BIN)/python tests/faults/table.py --slow

# The tables of docs/benchmarks.md, against peers in environments of their own; TABLES="step update" for some of them. vLLM's build for the CPU
# does not import beside the torchvision that it asks for.
bench: setup $(PEERS)/trl/.installed $(PEERS)/trl_ppo/.installed $(PEERS)/vllm/.installed
	$(BIN)/python benchmarks/tables.py $(TABLES) $(foreach peer,trl trl-ppo vllm,--$(peer) $(PEERS)/$(subst -,_,$(peer))/bin/python)

$(PEERS)/%/.installed: benchmarks/environments/%.txt
	test -x $(PEERS)/$*/bin/python || $(PYTHON) -m venv $(PEERS)/$*
	$(PEERS)/$*/bin/python -m pip install --quiet $(PIP_OPTIONS) --requirement $< torch
	-$(PEERS)/$*/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $@

# The comparison of docs/comparison.md; goes on where it was ended, and measures nothing twice. SHORT=1: eight algorithms,
# two seeds, half length. No other program should run beside it.
compare: setup
	OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(BIN)/python benchmarks/compare.py $(if $(SHORT),--short)

POLICY = --policy 0.5 1 --worlds independent redundant --rules passive mean_best_random bai_ts

# The figures of docs/exploration.md; goes on where it was ended, and measures nothing twice. SHORT=1: no laboratory, few
# runs. MODEL=DIR: another start model. No other program should run beside it.
explore: setup
	$(if $(SHORT)$(MODEL),,OMP_NUM_THREADS=1 $(BIN)/oat bench explore --jobs $(WORKERS) --out benchmarks/exploration/laboratory)
	$(if $(SHORT)$(MODEL),,OMP_NUM_THREADS=1 $(BIN)/oat bench explore $(POLICY) --jobs $(WORKERS) --out benchmarks/exploration/policy)
	OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(BIN)/python benchmarks/explore.py $(if $(SHORT),--short) $(if $(MODEL),--model $(MODEL))

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

type: setup
	$(BIN)/mypy

clean:
	rm -rf $(VENV) $(OLDEST) $(TRACKERS) $(PEERS) build *.egg-info src/*.egg-info
