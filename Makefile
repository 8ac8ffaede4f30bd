# `make demo` and `make test` make their own virtual environment; nothing else is needed but Python 3.11 or later.
PYTHON ?= python3
VENV ?= .venv
LOWEST ?= .venv-lowest
TESTS ?= tests
PART ?= 1/1
BIN := $(VENV)/bin
PIP := $(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: demo test test-lowest test-full opinfo lint pyright doctest bench gpu clean

demo: $(VENV)/examples.stamp
	$(BIN)/python examples/train_lm.py

test: lint
	$(BIN)/python -m pytest --numprocesses 2 --dist worksteal --doctest-modules fspmd tests

# the lowest versions that pyproject.toml admits, in an environment of their own: a few gigabytes, since torch 2.11 from
# the package index brings what it needs for GPUs
test-lowest: $(LOWEST)/test.stamp
	$(LOWEST)/bin/python -m pytest --numprocesses 2 --dist worksteal $(TESTS)

# every generated case, not a sample: hours. PART=1/8 runs the first of eight parts, PART=2/8 the second, and so on.
test-full: $(VENV)/dev.stamp
	FSPMD_FULL=1 FSPMD_PART=$(PART) $(BIN)/python -m pytest --numprocesses 2 --dist worksteal $(TESTS)

# torch's op database, all of it, in each mode
opinfo: $(VENV)/dev.stamp
	$(BIN)/python tests/opinfo/sweep.py --sizes uneven
	$(BIN)/python tests/opinfo/sweep.py --sizes even
	$(BIN)/python tests/opinfo/sweep.py --sizes uneven --mesh grid
	for written in named numpy pending; do \
	  $(BIN)/python tests/opinfo/sweep.py --samples 10 --placements 4 --mesh grid --written $$written || exit 1; \
	done

lint: $(VENV)/dev.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# the other type checker that users have; it is written in JavaScript, so it needs Node
pyright: $(VENV)/dev.stamp
	$(BIN)/pip install --quiet --disable-pip-version-check pyright
	$(BIN)/pyright --pythonpath $(BIN)/python

bench: $(VENV)/dev.stamp
	$(BIN)/python benchmarks/local.py
	$(BIN)/python benchmarks/dispatch.py
	$(BIN)/python benchmarks/jit.py
	$(BIN)/python benchmarks/auto_spec.py
	$(BIN)/python benchmarks/models.py
	$(BIN)/python benchmarks/checkpoints.py

# on a machine with one GPU, with the Python that has torch there: make gpu PYTHON=python3
gpu:
	$(PYTHON) benchmarks/gpu.py

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "fspmd needs Python 3.11 or later: make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv $(VENV)

$(VENV)/examples.stamp: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) --editable '.[examples]'
	touch $@

$(VENV)/dev.stamp: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) --editable '.[dev]'
	touch $@ $(VENV)/examples.stamp

$(LOWEST)/test.stamp: pyproject.toml constraints-lowest.txt
	$(PYTHON) -m venv $(LOWEST)
	$(LOWEST)/bin/pip install --quiet --disable-pip-version-check --constraint constraints-lowest.txt --editable '.[test,examples,auto]'
	touch $@

clean:
	rm -rf $(VENV) $(LOWEST) build out .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info
