# `make demo` and `make test` set up what they need, once. PYTHON and TORCH_INDEX may be given:
#   make demo PYTHON=python3.12 TORCH_INDEX=<address of PyTorch's CPU wheels>
PYTHON ?= python3
TORCH_INDEX ?=
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: demo test check lint types clean

demo: $(VENV)/.demo
	$(BIN)/normalcy doctor --fix --fail-on never --html report.html

test: $(VENV)/.test lint types
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto

check: $(VENV)/.test
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto tests/unit tests/laws

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.test
	$(BIN)/mypy

clean:
	rm -rf $(VENV) build dist src/*.egg-info report.html

$(VENV)/.torch: constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch
	$(PIP) 'setuptools>=77' wheel
	touch $@

$(VENV)/.demo: $(VENV)/.torch pyproject.toml
	$(PIP) --no-build-isolation -e '.[report]'
	touch $@

$(VENV)/.test: $(VENV)/.torch pyproject.toml tests/browser.sh
	$(PIP) --no-build-isolation -e '.[test]'
	sh tests/browser.sh
	touch $@
