# Two commands are enough: `make demo` trains, `make test` proves. Both make .venv first.
# Only python3 (3.11 or newer), pip and make are needed; another interpreter: make PYTHON=python3.12 demo
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

DEMO_RUN     ?= runs/demo
# From the start of the command; the model and the number of steps follow from what the machine is measured to do.
DEMO_MINUTES ?= 2.5
DEMO_FLAGS   ?=

# Nobody would keep what Python compiles when it imports, and every process would compile it anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo kernels test test-all lint check bench format docs clean

help:
	@echo 'make demo    train a small model on 4 processes with 4-bit communication, in at most 3 minutes'
	@echo 'make test    run the tests'
	@echo 'make test-all  and every cell of the products that they cover: each row of a suite on each of its grids'
	@echo 'make lint    ruff, mypy and the floors of the house'
	@echo 'make check   the same, and the tests of the documentation'
	@echo 'make bench   run the benchmarks and write their figures into README.md and the docs; takes days, in parts'
	@echo 'make format  let ruff format and fix what it can'
	@echo 'make docs    build the documentation into site/'
	@echo 'make clean   remove .venv and everything built (runs/ stays)'

demo: $(STAMP)
	$(BIN)/thinwire train --model auto --minutes $(DEMO_MINUTES) --data stdlib --strategy sdp4bit --workers 4 --local-size 1 \
	  --micro-batch 4 --lr 1e-3 --run-dir $(DEMO_RUN) --overwrite $(DEMO_FLAGS)

# Four files at a time, in the order of tests/conftest.py: a test has up to eight processes, and often all wait.
PYTEST := $(BIN)/python -m pytest -n 4 --dist loadfile --no-loadscope-reorder

# Into numba's cache, before several processes would compile the same.
kernels: $(STAMP)
	$(BIN)/python -m tests.preloaded

test: kernels
	$(PYTEST)

test-all: kernels
	$(PYTEST) -m ''

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

check: lint
	$(BIN)/python -m pytest tests/docs

bench: $(STAMP)
	@mkdir -p benchmarks/results
	$(BIN)/python benchmarks/codecs.py --json benchmarks/results/codecs.json
	$(BIN)/python benchmarks/loss.py --json benchmarks/results/loss.json
	$(BIN)/python benchmarks/frontier.py
	$(BIN)/python benchmarks/readme_table.py

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(STAMP)
	$(BIN)/mkdocs build --strict --site-dir site

clean:
	rm -rf $(VENV) site build dist .mypy_cache .ruff_cache .pytest_cache

# Made once, and again when the dependencies change. An existing .venv is kept and brought up to date.
# --no-compile: Python compiles what it imports, and all 14,000 files would take a minute longer.
$(STAMP): pyproject.toml constraints.txt
	@command -v $(PYTHON) >/dev/null || { echo 'thinwire needs Python 3.11 or newer: $(PYTHON) was not found; install it or say make PYTHON=/path/to/python3' >&2; exit 2; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "thinwire needs Python 3.11 or newer: $(PYTHON) is $$($(PYTHON) -V); say make PYTHON=python3.12 with one that is installed" >&2; exit 2; }
	@test -x $(BIN)/python || $(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { echo 'Python cannot make a virtual environment here: install its venv package (Debian, Ubuntu: apt-get install python3-venv)' >&2; exit 2; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@
