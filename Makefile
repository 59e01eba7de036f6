# make quickstart   train a tiny policy with RankBuffer on the CPU, end to end
# make test         run all tests
# make lint         check style
#
# Each sets up what it needs in .venv, once. It needs Python 3.11 or newer and make, nothing else.
# Without a GPU, TORCH_INDEX=<url of PyTorch's CPU wheels> saves several GB of CUDA libraries.

PYTHON ?= python3
TORCH_INDEX ?=
SEED ?= 0
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check

.PHONY: quickstart test lint benchmarks clean

quickstart: $(VENV)/installed
	DS_ACCELERATOR=cpu $(BIN)/python recipes/quickstart/run.py --seed $(SEED)

test: $(VENV)/installed-dev
	$(BIN)/python -m pytest

lint: $(VENV)/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

benchmarks: $(VENV)/installed
	DS_ACCELERATOR=cpu $(BIN)/python benchmarks/trainer_overhead.py
	DS_ACCELERATOR=cpu $(BIN)/python benchmarks/buffer_store.py

$(VENV)/installed: requirements.txt setup.py
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed; set PYTHON=...")'
	$(PYTHON) -m venv $(VENV)
	$(PIP) "$$(grep '^torch==' requirements.txt)" $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX))
	$(PIP) --editable .
	@touch $@

$(VENV)/installed-dev: $(VENV)/installed
	$(PIP) --editable '.[dev]'
	@touch $@

clean:
	rm -rf $(VENV) runs
