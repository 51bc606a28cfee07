# The few commands of this project. `make help` lists them.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
CXX_FILES := $(wildcard passes/*.cc passes/*.h)

.PHONY: help venv lib check test test-fast test-slow test-gpu check-gpu demo bench bench-kernels bench-planner bench-cost bench-cooptimise bench-pipeline bench-tuning clean

help:  ## List the commands
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | expand -t 16

$(STAMP): pyproject.toml CMakeLists.txt constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet --constraint constraints.txt torch
	$(BIN)/pip install --quiet --constraint constraints.txt scikit-build-core cmake ninja apache-tvm-ffi
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/pip install --quiet --constraint constraints.txt --no-build-isolation --editable '.[dev]'
	touch $@

venv: $(STAMP) lib  ## Make .venv with pinned dependencies and the C++ library

lib: $(STAMP)  ## Rebuild passes/ after a change in C++
	@PATH="$(abspath $(BIN)):$$PATH" $(BIN)/cmake -S . -B build/dev -G Ninja -DPython_EXECUTABLE=$(abspath $(BIN)/python) > /dev/null
	@PATH="$(abspath $(BIN)):$$PATH" $(BIN)/cmake --build build/dev -- --quiet

check: venv  ## Lint, types, layers, formatting
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/clang-format --dry-run --Werror $(CXX_FILES)

test: check test-fast test-slow  ## Everything that CI runs

test-fast: venv  ## The default tests, about 20 minutes on two cores
	$(BIN)/python -m pytest -m "not slow" -n 2 --dist loadfile

test-slow: venv  ## Real models at real sizes, and the tutorials
	$(BIN)/python -m pytest -m slow -n 2 --dist loadfile

test-gpu: venv  ## The tests that need an NVIDIA GPU
	$(BIN)/python -m pytest -m gpu

check-gpu: venv  ## Does it run on the GPUs of this machine: right, and how fast? Send its output along with a report
	$(BIN)/python -m benchmarks.gpu

demo: venv  ## ResNet-50 over two unlike CPU types: plan, build, run, measure
	$(BIN)/python tutorials/demo.py

bench: venv  ## Build against plain TVM on one device
	$(BIN)/python -m benchmarks.one_device

bench-kernels: venv  ## Whole models on one device against torch and plain TVM
	$(BIN)/python -m benchmarks.kernels

bench-planner: venv  ## Planner against published planners on their own inputs
	$(BIN)/python -m benchmarks.planner table

bench-cost: venv  ## Cost models against published predictors on published measurements
	$(BIN)/python -m benchmarks.cost_models

bench-cooptimise: venv  ## Fusion and placement decided together against one after the other
	$(BIN)/python -m benchmarks.cooptimise

bench-pipeline: venv  ## Pipelines over two CPU types against their plans, one device and an equal split
	$(BIN)/python -m benchmarks.pipeline --profile 150
	$(BIN)/python -m benchmarks.pipeline

bench-tuning: venv  ## Trials where the plan gains against trials in turn, replayed
	$(BIN)/python -m benchmarks.tuning replay

clean:  ## Remove everything that was built
	rm -rf $(VENV) build dist tvmhet/lib *.egg-info
