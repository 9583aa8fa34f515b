# Four commands: install, check, test, bench; and the demo. Each makes the virtual environment it needs, once.
#
#   make demo                    the main job: real files on disk -> shuffled minibatches -> a falling loss
#   make test                    the test suite
#   make demo TORCH='torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu'   the smaller, CPU-only PyTorch

PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV ?= .venv
BIN := $(VENV)/bin
FILE ?= demo-data/tahoe_shaped.h5ad

.PHONY: demo test check bench install clean

demo: $(VENV)/demo.stamp
	$(BIN)/gpuload demo

test: $(VENV)/test.stamp
	$(BIN)/python -m pytest

check: $(VENV)/check.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(VENV)/bench.stamp
	$(BIN)/python -m benchmarks.run_rivals --file $(FILE)

install: $(VENV)/demo.stamp

# torch first and alone: pulled in through another package's range it may come as a different build.
$(VENV)/torch.stamp:
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(v < (3, 11) and f"gpuload needs Python 3.11 or newer, but $(PYTHON) is {v[0]}.{v[1]}; run: make PYTHON=python3.12 $(MAKECMDGOALS)")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(TORCH)
	@touch $@

$(VENV)/%.stamp: pyproject.toml | $(VENV)/torch.stamp
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[$*]'
	@touch $@

clean:
	rm -rf $(VENV) demo-data
