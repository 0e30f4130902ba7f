# `make demo` and `make test` do all set-up themselves; the rest is for developers.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

# Tests start hundreds of processes; without cached bytecode each would compile the whole package again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo test quick test-all lint format bench dist release-check docs clean
.DEFAULT_GOAL := help

help:
	@echo "make demo    install, generate a click log, train a model on it"
	@echo "make test    install, lint, type-check, run the tests: under ten minutes on two cores"
	@echo "make test-all  the tests that need namespaces, many processes or minutes"
	@echo "make lint    only ruff and mypy        make format  rewrite with ruff"
	@echo "make docs    build the site into site/  make dist    build wheel and sdist into dist/"
	@echo "make release-check  install the wheel elsewhere and do there what the README shows; minutes"
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

# More at a time than cores: many tests wait for processes that they have started. A worker that dies ends the
# run: pytest-xdist gives its tests to the next one, and may wait for ever.
PYTEST := $(BIN)/python -m pytest --dist loadfile --no-loadscope-reorder --max-worker-restart 0

# Side by side: the type checker uses one core, and tests leave some of the other unused.
test: $(STAMP)
	@$(MAKE) --no-print-directory -j 2 lint quick

quick: $(STAMP)
	$(PYTEST) -n 3 -m 'not slow'

# Some need a real Redis or a browser; without it they are skipped, and say so.
test-all: $(STAMP)
	@testbed/install_redis.sh
	@testbed/install_chromium.sh
	$(PYTEST) -n 3 -m slow

bench: $(STAMP)
	$(BIN)/python benchmarks/run_all.py

# The rest needs packages of its own, in an environment of its own.
RELEASE       ?= .venv-release
RELEASE_BIN   := $(RELEASE)/bin
RELEASE_STAMP := $(RELEASE)/.installed
$(RELEASE_STAMP): pyproject.toml constraints.txt
	@test -x $(RELEASE_BIN)/python || $(PYTHON) -m venv $(RELEASE)
	$(RELEASE_BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs,release]'
	@touch $@

dist: $(RELEASE_STAMP)
	rm -rf dist
	$(RELEASE_BIN)/python -m build --quiet
	$(RELEASE_BIN)/twine check --strict dist/*

# Other interpreters: make release-check PYTHONS='python3.11 python3.12 python3.13'
PYTHONS ?= $(PYTHON)
release-check: dist
	$(RELEASE_BIN)/python release/check.py dist/*.whl --constraints constraints.txt --python $(PYTHON)
	for one in $(PYTHONS); do \
	  $(RELEASE_BIN)/python release/check.py dist/*.whl --constraints release/lowest.txt --python $$one \
	    --demo-rows 20000 || exit 1; \
	done
	$(RELEASE_BIN)/python release/check.py dist/*.whl --constraints release/newest.txt --python $(PYTHON) --demo-rows 20000

docs: $(RELEASE_STAMP)
	NO_MKDOCS_2_WARNING=1 $(RELEASE_BIN)/mkdocs build --strict --quiet

clean:
	rm -rf $(VENV) $(RELEASE) build dist site src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis demo-run
	find src tests benchmarks testbed -name __pycache__ -type d -prune -exec rm -rf {} +
