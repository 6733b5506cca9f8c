# make demo    a first look: installs into .venv and runs examples/quickstart.py
# make test    installs the test extra and runs the suite
# make lint    format, lint and type checks: the same hooks as pre-commit
# make docs    the documentation as a site in build/docs
# make clean   removes what the other targets made
#
# Variables: PYTHON=python3.12        interpreter to build the environment from (3.10 to 3.13)
#            TORCH='torch==2.11.0'    torch to install instead of the one that suits this machine
#            VENV=/path               where the environment goes
#            PYTEST_ARGS='-k causal'  more arguments for pytest
#            JOBS=1                   test processes

PYTHON ?= python3
VENV ?= .venv
TORCH ?=
JOBS ?= auto
PYTEST_ARGS ?=

SETUP = $(PYTHON) tools/setup_env.py --venv $(VENV) --torch "$(TORCH)"
BIN = $(VENV)/bin

.DEFAULT_GOAL := help
.PHONY: help demo test lint docs clean

help:
	@sed -n '/^$$/q; s/^# \{0,1\}//p' Makefile

demo:
	@$(SETUP) --extra test
	@$(BIN)/python examples/quickstart.py

# One torch thread per process: the processes already fill the cores.
test:
	@$(SETUP) --extra test
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --maxprocesses 8 $(PYTEST_ARGS)

# Type checking reads torch and the tests' packages, so both extras are there.
lint:
	@$(SETUP) --extra test --extra lint
	PATH="$(abspath $(BIN)):$$PATH" pre-commit run --all-files

docs:
	@$(SETUP) --extra docs
	$(BIN)/python tools/make_support_table.py
	$(BIN)/mkdocs build --strict --quiet --site-dir build/docs

clean:
	rm -rf .venv build dist *.egg-info .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +
