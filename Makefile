# `make demo` and `make test` are all a newcomer needs; both create .venv and install from PyPI on first use, the demo
# only what it needs.

VENV ?= .venv
PYTHON ?= python3
BIN := $(VENV)/bin
# What pip may install; empty: the newest of all that pyproject.toml allows.
CONSTRAINTS ?= $(CURDIR)/tests/constraints.txt
# The tests start many processes, and each would compile every module where Python may not write what it compiled.
PYTEST := env -u PYTHONDONTWRITEBYTECODE PYTHONPYCACHEPREFIX=$(abspath $(VENV))/pycache $(BIN)/python -m pytest

.PHONY: demo test test-all test-floor test-newest test-vision test-transformers test-vllm test-titan soak-vllm mutations lint types check results docs wheel clean

demo: $(VENV)/.installed-compare
	$(BIN)/headwater compare recipes/demo/induction.yaml recipes/demo/language.yaml --out runs/demo

test: $(VENV)/.installed-dev
	$(PYTEST) -n auto --dist worksteal

test-all: $(VENV)/.installed-dev
	$(PYTEST) -n auto --dist worksteal -m "slow or not slow"

# With the oldest versions of torch and transformers that pyproject.toml allows, in an environment of their own. Of the slow
# tests, those of `bench gpu` and of compiled graphs: images for GPUs often have these versions.
test-floor:
	$(MAKE) test VENV=.venv-floor CONSTRAINTS=$(CURDIR)/tests/floor.txt
	.venv-floor/bin/python -m pytest -n auto -m slow tests/bench/test_gpu.py tests/nn/test_graphs.py

# With the newest versions that the package index has. If they pass, util/versions.py may name them.
test-newest:
	$(MAKE) test VENV=.venv-newest CONSTRAINTS=

# Those of images, with torchvision, which beside a PyTorch for CPUs only headwater can import: so it is imported first, and
# pytest is one process. The deselected test starts one without headwater; it runs in test-all.
test-vision:
	$(MAKE) VENV=.venv-vision .venv-vision/.installed-dev,vision
	.venv-vision/bin/python -m pytest -p headwater -m "slow or not slow" tests/vision tests/data/test_images.py \
		tests/training/test_training_images.py tests/inspection/test_inspect_images.py tests/test_paper_recipes.py \
		--deselect tests/vision/test_image_use.py::test_exported_with_its_code

# Not part of the others: the first time it fetches transformers' sources from the package index.
test-transformers: $(VENV)/.installed-dev
	HF_HUB_OFFLINE=1 PYTHONPATH=tests/transformers_suite $(BIN)/python -m pytest -n auto -o addopts=-q -W ignore \
		-p against_llama tests/transformers_suite/suite.py

# In vLLM itself, in an environment of its own, which takes 4 GB; within ten minutes on two cores. vLLM's images and sound
# come for GPUs only, and beside a PyTorch for CPUs they break transformers' imports.
test-vllm: .venv-vllm/.installed-vllm
	.venv-vllm/bin/python -m pytest --noconftest -o addopts=-q -p no:cacheprovider tests/vllm_suite/suite.py

# 10,000 requests to twelve models in vLLM.
soak-vllm: .venv-vllm/.installed-vllm
	.venv-vllm/bin/python tests/vllm_suite/soak.py

.venv-vllm/.installed-vllm: pyproject.toml
	test -x .venv-vllm/bin/python || $(PYTHON) -m venv .venv-vllm
	.venv-vllm/bin/python -m pip install --quiet --editable ".[vllm]" "pytest>=8.4,<10" "peft>=0.18,<1"
	.venv-vllm/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@touch $@

# With torchtitan, without its dependencies, which ask for older versions of datasets. The output goes into a file first: a
# process that multiprocessing leaves behind keeps a pipe open, and whoever reads the pipe would wait for it.
test-titan: .venv-titan/.installed-titan
	.venv-titan/bin/python -m pytest -m "slow or not slow" tests/test_titan.py > .venv-titan/output.txt 2>&1; \
		code=$$?; cat .venv-titan/output.txt; exit $$code

.venv-titan/.installed-titan: pyproject.toml tests/constraints.txt
	$(MAKE) VENV=.venv-titan .venv-titan/.installed-dev
	.venv-titan/bin/python -m pip install --quiet --no-deps torchtitan==0.3.0 spmd-types==0.2.3 torch_checkpointing \
		torchdata tyro docstring-parser typeguard einops triton
	@touch $@

# 300 changes of the code, drawn by a seed; SAMPLE='--count 100 --seed 1' draws others. Half an hour on two cores.
mutations: $(VENV)/.installed-dev,mutations
	OMP_NUM_THREADS=1 $(BIN)/python tests/mutations.py $(SAMPLE)

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check src tests
	$(BIN)/ruff format --check src tests
	$(BIN)/lint-imports --no-cache

types: $(VENV)/.installed-dev
	$(BIN)/mypy

check: lint types test

# Write docs/results.md from results/summary.md and the stored runs.
results: $(VENV)/.installed-dev
	PYTHONPATH=docs/build $(BIN)/python -m result_pages.placeholders

docs: $(VENV)/.installed-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

wheel:
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet "build>=1.3,<2"
	$(BIN)/python -m build

$(VENV)/.installed-%: pyproject.toml tests/constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit("headwater needs Python 3.11 or newer; name one with make PYTHON=…") if sys.version_info < (3, 11) else 0'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	PIP_CONSTRAINT=$(CONSTRAINTS) $(BIN)/python -m pip install --quiet --editable ".[$*]"
	@touch $@

clean:
	rm -rf $(VENV) .venv-floor .venv-newest .venv-vision .venv-vllm .venv-titan dist site mutants .pytest_cache .mypy_cache .ruff_cache
