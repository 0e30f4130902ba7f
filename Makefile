# `make demo` and `make test` do all set-up themselves; the rest is for developers.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

.PHONY: help demo test test-all lint format bench clean
.DEFAULT_GOAL := help

help:
	@echo "make demo    install, generate a click log, train a model on it"
	@echo "make test    install, lint, type-check, run the tests: under ten minutes on two cores"
	@echo "make test-all  the tests that need namespaces, many processes or minutes"
	@echo "make lint    only ruff and mypy        make format  rewrite with ruff"
	@echo "make bench   run every benchmark       make clean   remove the environment and what was built"

$(STAMP): pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

demo: $(STAMP)
	$(BIN)/rowhaul demo

lint: $(STAMP)
	$(BIN)/ruff check --no-cache .
	$(BIN)/ruff format --no-cache --check .
	$(BIN)/mypy

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# More at a time than cores: many tests wait for processes that they have started.
PYTEST := $(BIN)/python -m pytest --dist loadfile --no-loadscope-reorder

test: lint
	$(PYTEST) -n 3 -m 'not slow'

# Some need a real Redis or a browser; without it they are skipped, and say so.
test-all: $(STAMP)
	@testbed/install_redis.sh
	@testbed/install_chromium.sh
	$(PYTEST) -n 2 -m slow

bench: $(STAMP)
	$(BIN)/python benchmarks/run_all.py

clean:
	rm -rf $(VENV) build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis demo-run
	find src tests benchmarks testbed -name __pycache__ -type d -prune -exec rm -rf {} +
