# Everything a newcomer needs: every target sets up .venv by itself.
PYTHON ?= python3
MODEL ?= nano
VENV := .venv
STAMP := $(VENV)/.installed
PIP := $(VENV)/bin/pip --quiet --disable-pip-version-check install --constraint constraints.txt

.PHONY: install serve test check format clean

install: $(STAMP)

# torch by its exact version first: asked for by a range, pip would take another build of it.
$(STAMP): pyproject.toml constraints.txt
	test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	$(PIP) "torch==2.13.0"
	$(PIP) --editable ".[dev]"
	touch $(STAMP)

serve: install
	$(VENV)/bin/shoal serve --model $(MODEL)

test: install
	scripts/test

check: install
	scripts/check

format: install
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache
