# `make demo` and `make test` are all a newcomer needs; both create .venv and install from PyPI on first use.

VENV ?= .venv
PYTHON ?= python3
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.PHONY: demo test test-all test-transformers mutations lint types check wheel clean

demo: $(INSTALLED)
	$(BIN)/headwater compare recipes/demo/induction.yaml recipes/demo/language.yaml --out runs/demo

test: $(INSTALLED)
	$(BIN)/python -m pytest -n auto

test-all: $(INSTALLED)
	$(BIN)/python -m pytest -n auto -m "slow or not slow"

# Not part of the others: the first time it fetches transformers' sources from the package index.
test-transformers: $(INSTALLED)
	HF_HUB_OFFLINE=1 PYTHONPATH=tests/transformers_suite $(BIN)/python -m pytest -n auto -o addopts=-q -W ignore \
		-p against_llama tests/transformers_suite/suite.py

# Deliberate mistakes, each with the tests that must notice it: within an hour on two cores.
mutations: $(INSTALLED)
	$(BIN)/python tests/mutations/run.py

lint: $(INSTALLED)
	$(BIN)/ruff check src tests
	$(BIN)/ruff format --check src tests

types: $(INSTALLED)
	$(BIN)/mypy

check: lint types test

wheel: $(INSTALLED)
	$(BIN)/python -m build

$(INSTALLED): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit("headwater needs Python 3.11 or newer; name one with make PYTHON=…") if sys.version_info < (3, 11) else 0'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --editable ".[dev]"
	@touch $@

clean:
	rm -rf $(VENV) dist .pytest_cache .mypy_cache .ruff_cache
