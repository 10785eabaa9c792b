# Three commands matter: `make check` (what CI runs), `make test`, `make demo`. Each sets itself up in .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
AREAS := core fast general recurrent learners checkpoints ctde coverage
# Passed on to pytest, e.g. make test ARGS="tests/test_advantages.py -x"
ARGS ?=
# Seconds for one slow test
SLOW_TIMEOUT ?= 3600

# One thread a process: small networks are faster so, and Ray starts a process per runner.
export OMP_NUM_THREADS ?= 1
export MPLBACKEND ?= Agg
export RAY_USAGE_STATS_ENABLED ?= 0
export PIP_DISABLE_PIP_VERSION_CHECK ?= 1
export PIP_NO_INPUT ?= 1

# The stamp names the Python version, so another PYTHON gives another environment.
version_of = $(1) -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null
PYVERSION := $(shell $(call version_of,$(PYTHON)))
STAMP := $(VENV)/.installed-$(PYVERSION)

# setuptools comes first and builds the package without isolation, so that no version is outside the constraints.
PIP_INSTALL = $(BIN)/python -m pip install --progress-bar off -c constraints.txt
INSTALL_LOG := $(VENV)/install.log

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help setup demo demo-short test check lint format format-check types slow clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-13s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(STAMP)  ## make or update .venv with the tested versions (also done by every target below)
	@:

$(STAMP): pyproject.toml constraints.txt
	@test -n "$(PYVERSION)" || { echo "cannot run '$(PYTHON)': give a Python 3.10 to 3.13, e.g. make PYTHON=python3.11" >&2; exit 1; }
	@echo "setting up $(VENV) for Python $(PYVERSION): takes minutes, log in $(INSTALL_LOG)"
	@test "$$($(call version_of,$(BIN)/python))" = "$(PYVERSION)" || $(PYTHON) -m venv --clear $(VENV)
	@rm -f $(VENV)/.installed-*
	@{ $(PIP_INSTALL) setuptools torch==2.13.0 && $(PIP_INSTALL) --no-build-isolation -e '.[dev]'; } \
		>$(INSTALL_LOG) 2>&1 || { tail -n 30 $(INSTALL_LOG) >&2; echo "installing failed, see $(INSTALL_LOG)" >&2; exit 1; }
	@touch $@

demo: $(STAMP)  ## train on the built-in bucket brigade, with plots in runs/demo-<time> (up to 4 minutes)
	$(BIN)/thrust-rllib train bucket_brigade --env-config scenario=minimal_specialization --redundancy 0.1 \
		--steps 300000 --seed 0 --output runs/demo-$$(date +%Y%m%d-%H%M%S)

demo-short: $(STAMP)  ## the same for two iterations, in a temporary folder
	@dir=$$(mktemp -d) && trap 'rm -rf "$$dir"' EXIT && \
		$(BIN)/thrust-rllib train bucket_brigade --iterations 2 --output "$$dir/run"

test: $(STAMP)  ## the default tests (up to 30 minutes)
	$(BIN)/python -m pytest $(ARGS)

check: lint format-check types test demo-short  ## everything that CI checks

lint: $(STAMP)  ## ruff's rules
	$(BIN)/ruff check .

format: $(STAMP)  ## rewrite the code in ruff's format, and repair what ruff can repair
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

format-check: $(STAMP)  ## fail where `make format` would change a layout
	$(BIN)/ruff format --check .

types: $(STAMP)  ## mypy on the package
	$(BIN)/mypy

slow: $(STAMP)  ## learning and long tests of one area, e.g. make slow AREA=core
	@test -n "$(filter $(AREAS),$(AREA))" || { echo "AREA is '$(AREA)': make slow AREA=X, X one of: $(AREAS)" >&2; exit 2; }
	$(BIN)/python -m pytest -m slow_$(AREA) --timeout $(SLOW_TIMEOUT) $(ARGS)

clean:  ## remove caches and build outputs; .venv and runs stay
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -path ./$(VENV) -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +
