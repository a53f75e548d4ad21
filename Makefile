# Two commands: `make run` answers a prompt on a fresh machine, `make test` proves that all is right.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin

.PHONY: run test lint types pytest nightly docs clean

run: $(VENV)/.installed
	$(BIN)/seethrough pull
	$(BIN)/seethrough run "Neural Bits Newsletter is" --temperature 0 --max-tokens 16

test: $(VENV)/.tested lint types pytest

lint: $(VENV)/.tested
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.tested
	$(BIN)/mypy

pytest: $(VENV)/.tested
	$(BIN)/pytest -m "not nightly"

# Long fuzz runs.
nightly: $(VENV)/.tested
	$(BIN)/pytest -m nightly

# The docs that are made from data.
docs: $(VENV)/.installed
	$(BIN)/python -m seethrough.stages_doc
	$(BIN)/python -m seethrough.cli.doc

$(VENV)/bin/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed")'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: $(VENV)/bin/python pyproject.toml
	$(BIN)/pip install --quiet --disable-pip-version-check -e .
	touch $@

# torch first and pinned: what comes after finds it installed.
$(VENV)/.tested: $(VENV)/.installed
	$(BIN)/pip install --quiet --disable-pip-version-check torch==2.13.0
	$(BIN)/pip install --quiet --disable-pip-version-check -e '.[test]'
	touch $@

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .hypothesis
