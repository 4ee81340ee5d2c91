# Every target does its own set-up in .venv (PYTHON=python3.11 chooses another Python; FEDLORA_TORCH=cuda a CUDA torch).
VENV ?= .venv
export OMP_NUM_THREADS ?= 1
export VENV

.PHONY: demo test check lint test-long bench setup clean

setup:
	@scripts/setup $(VENV)

demo: setup
	@$(VENV)/bin/python examples/demo/run.py $(DEMO_ARGS)

# Tests of one file run in one process, in order; WORKERS files side by side (WORKERS=0: all in this process).
WORKERS ?= 2
DIST ?= loadfile
PYTEST = $(VENV)/bin/python -m pytest -n $(WORKERS) --dist $(DIST)

test: setup
	@$(PYTEST) -m "not long and not network and not postgres"

LONG ?=
test-long: setup
	@$(PYTEST) -m "long or network or postgres" $(LONG)

check: lint test

lint: setup
	@scripts/check

bench: setup
	@$(VENV)/bin/python benchmarks/step_time.py

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .hypothesis dist
