# Every target does its own set-up in .venv (PYTHON=python3.11 chooses another Python; FEDLORA_TORCH=cuda a CUDA torch).
VENV ?= .venv
export OMP_NUM_THREADS ?= 1
export VENV

.PHONY: demo test check lint test-long bench setup clean

setup:
	@scripts/setup $(VENV)

demo: setup
	@$(VENV)/bin/python examples/demo/run.py $(DEMO_ARGS)

test: setup
	@$(VENV)/bin/python -m pytest -m "not long and not network and not postgres"

LONG ?=
test-long: setup
	@$(VENV)/bin/python -m pytest -m "long or network or postgres" $(LONG)

check: setup
	@scripts/check --tests

lint: setup
	@scripts/check

bench: setup
	@$(VENV)/bin/python benchmarks/step_time.py

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .hypothesis dist
