# `make demo` and `make test` need Python (3.11 or later) and pip, and nothing else.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
LOCK ?= requirements.lock

.PHONY: demo test lint types bench docs clean

demo: $(VENV)/.installed
	$(BIN)/python examples/japanese_vowels.py

test: lint types $(VENV)/.installed
	$(BIN)/python -m pytest -n 2 --dist worksteal

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.installed
	$(BIN)/pyright --pythonpath $(BIN)/python

bench: $(VENV)/.installed
	$(BIN)/python -m benchmarks

docs: $(VENV)/.installed
	$(BIN)/python docs/pictures.py
	$(BIN)/mkdocs build --strict

# The stamp is made last, so that an interrupted installation is done again.
$(VENV)/.installed: $(LOCK) pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --requirement $(LOCK)
	$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation --editable .
	touch $@

clean:
	rm -rf $(VENV) site
