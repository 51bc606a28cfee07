# The few commands of this project. `make help` lists them.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

.PHONY: help venv lib check test test-fast test-slow demo clean

help:  ## List the commands
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | expand -t 16

$(STAMP): pyproject.toml CMakeLists.txt constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet --constraint constraints.txt torch
	$(BIN)/pip install --quiet --constraint constraints.txt scikit-build-core cmake ninja apache-tvm-ffi
	$(BIN)/pip install --quiet --constraint constraints.txt --no-build-isolation --editable '.[dev]'
	touch $@

venv: $(STAMP)  ## Make .venv with pinned dependencies and the C++ library

lib: $(STAMP)  ## Rebuild passes/ after a change in C++
	$(BIN)/cmake -S . -B build/dev -DPython_EXECUTABLE=$(abspath $(BIN)/python) -DCMAKE_BUILD_TYPE=Release > /dev/null
	$(BIN)/cmake --build build/dev

clean:  ## Remove everything that was built
	rm -rf $(VENV) build dist tvmhet/lib *.egg-info
