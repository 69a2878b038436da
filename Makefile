# `make` alone lists the targets. Needs only Python 3.11 and make; everything else goes into .venv.
PYTHON ?= python3.11
VENV   := .venv
BIN    := $(VENV)/bin
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# One thread per BLAS call: two test workers or two kernels share two cores, and sums stay in one order.
ONE_THREAD := OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1

.PHONY: help app test test-rest test-gpu selftest lint samples sass bench golden clean

help:  ## list the targets
	@awk -F':.*## ' '/^[a-z-]+:.*## /{printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

PY := $(shell command -v $(PYTHON) 2>/dev/null || command -v python3)

$(BIN)/python:
	@test -n "$(PY)" || { echo "nvfp4viz needs Python 3.11: install it, or run make PYTHON=/path/to/python3.11"; exit 1; }
	@"$(PY)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "nvfp4viz needs Python 3.11 or newer, $(PY) is older: run make PYTHON=/path/to/python3.11"; exit 1; }
	"$(PY)" -m venv $(VENV)

$(VENV)/.app: requirements.txt | $(BIN)/python
	$(BIN)/python -m pip install -q -r requirements.txt
	@touch $@

$(VENV)/.dev: requirements.txt requirements-cluster.txt requirements-dev.txt | $(BIN)/python
	$(BIN)/python -m pip install -q -r requirements-dev.txt
	@touch $@ $(VENV)/.app

app: $(VENV)/.app  ## install what is needed and start the app
	$(BIN)/python -m nvfp4viz.warm
	$(BIN)/streamlit run app.py

test: $(VENV)/.dev  ## install what tests need and run them (minutes)
	$(ONE_THREAD) $(BIN)/python -m pytest -n 2 --dist loadfile -m "not slow and not browser"

test-rest: $(VENV)/.dev  ## the slow tests and those that drive Chromium (needs g++ and Chromium)
	$(ONE_THREAD) $(BIN)/python -m pytest -n 2 --dist loadfile -m "slow and not browser"
	$(ONE_THREAD) $(BIN)/python -m pytest -n 2 --dist loadfile -m browser || $(ONE_THREAD) $(BIN)/python -m pytest -m browser --last-failed --last-failed-no-failures none

# A machine that has torch, CuPy and pytest already: make test-gpu GPU_PYTHON=python3
GPU_PYTHON ?=
test-gpu: $(if $(GPU_PYTHON),,$(VENV)/.dev)  ## the tests that need a CUDA GPU; without one they fail, saying why
	NVFP4VIZ_REQUIRE_GPU=1 $(or $(GPU_PYTHON),$(BIN)/python) -m pytest tests/gpu -m gpu

selftest: $(if $(GPU_PYTHON),,$(VENV)/.app)  ## compare this machine's GPU with the documented bits; writes selftest-<gpu>.md
	$(or $(GPU_PYTHON),$(BIN)/python) -m nvfp4viz.device.selftest

lint: $(VENV)/.dev  ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

samples: $(VENV)/.app  ## rebuild the shipped sample checkpoints from their seeds and statistics
	$(BIN)/python -m sample_checkpoints.build

sass: $(VENV)/.dev  ## rewrite kernels/sass: what the changed kernels become on each architecture (minutes; no GPU)
	$(BIN)/python -m nvfp4viz.device.disassemble

bench: $(VENV)/.dev  ## measure; peers are installed into .venv-peers
	$(BIN)/python -m benchmarks

golden:  ## rebuild tests/golden with the real packages (installs them into .venv-peers*)
	$(MAKE) $(VENV)/.dev
	$(BIN)/python -m tests.golden.make_golden

clean:  ## remove the environment and caches
	rm -rf $(VENV) .venv-* .cache sample_checkpoints/built
