# Two commands for a newcomer: `make install`, `make test`.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip --disable-pip-version-check --quiet

.PHONY: install test test-all lint format clean

install: $(VENV)/.installed

# torch first, with its dependencies: elsewhere than on a CPU-only index the CUDA build needs them.
# The rest is a complete lock, so pip must not resolve anything.
$(VENV)/.installed: requirements.lock pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install torch==2.13.0
	$(PIP) install --no-deps -r requirements.lock
	$(PIP) install --no-deps --no-build-isolation -e .
	touch $@

test: install
	$(BIN)/pytest -m "not slow"

test-all: install
	$(BIN)/pytest

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
