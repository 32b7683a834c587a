# For a newcomer: `make install`, `make smoke`, `make test`.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
SEED ?= 0
PIP := $(BIN)/pip --disable-pip-version-check --quiet

.PHONY: install smoke smoke-scratch smoke-control test test-all lint format clean

install: $(VENV)/.installed

# torch first, with its dependencies: elsewhere than on a CPU-only index the CUDA build needs them.
# The rest is a complete lock, so pip must not resolve anything.
$(VENV)/.installed: requirements.lock pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install torch==2.13.0
	$(PIP) install --no-deps -r requirements.lock
	$(PIP) install --no-deps --no-build-isolation -e .
	touch $@

smoke: install
	$(BIN)/k3rl smoke --seed $(SEED)

smoke-scratch: install
	$(BIN)/k3rl smoke --seed $(SEED) --scratch

smoke-control: install
	$(BIN)/k3rl smoke --seed $(SEED) --control

test: install
	$(BIN)/pytest -m "not slow"

test-all: install
	$(BIN)/pytest
	$(MAKE) smoke smoke-control smoke-scratch

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
