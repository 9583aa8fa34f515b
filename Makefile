# Four commands: install, check, test, bench; and the demo. Each makes the virtual environment it needs, once.
#
#   make demo                    the main job: real files on disk -> shuffled minibatches -> a falling loss
#   make test                    the test suite; make test-all, also the tests that take longer
#   make docs                    the documentation, in build/docs
#   make test-gpu                the tests that need a GPU; make bench-gpu, the benchmark on one, with BENCH_GPU='its options'
#   make test-gpu GPULOAD_PYTHON=python3       with that interpreter as it is: nothing is made, installed or downloaded
#   make demo TORCH='torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu'   the smaller, CPU-only PyTorch

PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV ?= .venv
BIN := $(VENV)/bin
# Tests wait now and then, for programs that they start; so a few more of them than there are processors.
# The libraries of linear algebra use one thread each, as their own would wait for those of the other tests.
WORKERS ?= $(shell n=$$(nproc 2>/dev/null || echo 2); echo $$((n + (n + 1) / 2)))
# Whatever installs packages into the virtual environment, as pip is told to; torch itself always comes by pip.
INSTALL ?= $(BIN)/python -m pip install --quiet --disable-pip-version-check
FILE ?= demo-data/tahoe_shaped.h5ad
GPU_TESTS := tests/cuda/test_gpu.py tests/cuda/test_gpu_programs.py tests/e2e/test_pipelines.py

.PHONY: demo test test-all check docs bench test-gpu bench-gpu install clean

demo: $(VENV)/demo.stamp
	$(BIN)/gpuload demo

PYTEST = OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal --durations=25

test: $(VENV)/test.stamp
	$(PYTEST)

test-all: $(VENV)/test.stamp
	$(PYTEST) -m 'not gpu'

check: $(VENV)/check.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

docs: $(VENV)/docs.stamp
	$(BIN)/python -m sphinx -W --keep-going -n docs build/docs

bench: $(VENV)/bench.stamp
	$(BIN)/python -m benchmarks.run_rivals --file $(FILE)

GPU_PYTHON = $(or $(GPULOAD_PYTHON),$(BIN)/python)

test-gpu: $(if $(GPULOAD_PYTHON),,$(VENV)/test.stamp)
	@$(GPU_PYTHON) -c 'import sys; from gpuload.backends.cuda.device import n_gpus; sys.exit(not n_gpus() and "make test-gpu: no GPU can be used here; python -m gpuload doctor says why")'
	$(GPU_PYTHON) -m pytest -m gpu $(GPU_TESTS)

bench-gpu: $(if $(GPULOAD_PYTHON),,$(VENV)/bench,cuda13.stamp)
	$(GPU_PYTHON) -m benchmarks.run_gpu $(BENCH_GPU)

install: $(VENV)/demo.stamp

$(BIN)/python:
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(v < (3, 11) and f"gpuload needs Python 3.11 or newer, but $(PYTHON) is {v[0]}.{v[1]}; run: make PYTHON=python3.12 $(MAKECMDGOALS)")'
	$(PYTHON) -m venv $(VENV)

# torch first and alone: pulled in through another package's range it may come as a different build.
$(VENV)/torch.stamp: | $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(TORCH)
	@touch $@

$(VENV)/%.stamp: pyproject.toml | $(VENV)/torch.stamp
	$(INSTALL) -e '.[$*]'
	@touch $@

clean:
	rm -rf $(VENV) demo-data
