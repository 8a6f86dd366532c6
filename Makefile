# Every target makes its own .venv when there is none (plain pip, versions held by constraints.txt).
PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
INSTALL := $(PY) -m pip install --quiet --disable-pip-version-check --retries 5 -c constraints.txt
JOBS ?= 2
BENCH ?= step

# One thread per process: results do not depend on the machine, and parallel tests do not fight over cores.
export OMP_NUM_THREADS := 1
export MKL_NUM_THREADS := 1

.PHONY: run test lint unit format bench docs test-slow test-deploy test-long studies release-check clean
.DEFAULT_GOAL := run

# An interrupted install leaves .installing; the next `make` rebuilds.
$(VENV)/.installed: pyproject.toml constraints.txt
	@rm -f $@
	@if [ -e $(VENV)/.installing ] || ! $(PY) -m pip --version >/dev/null 2>&1; then \
		echo "making $(VENV), once; torch is large, this takes minutes"; $(PYTHON) -m venv --clear $(VENV); fi
	@touch $(VENV)/.installing
	$(INSTALL) -e ".[dev]"
	@mv $(VENV)/.installing $@

# `make .venv/.extra-docs`, `.extra-flower`, …: one more extra of pyproject.toml in the same environment.
$(VENV)/.extra-%: $(VENV)/.installed
	@rm -f $@
	$(INSTALL) -e ".[$*]"
	@touch $@

run: $(VENV)/.installed  ## the demo: pFedGate beside its strongest cheap opponents, a table and a report to open
	$(VENV)/bin/pfedgate demo

test: lint unit  ## everything CI runs: lint, types, tests, doctests

lint: $(VENV)/.installed
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy --strict

# Flower too: a deployed run with TLS and keys, and one with a node that is killed, are part of CI. So is the report in a
# real browser: on a person's machine these tests are skipped where there is none, in CI it is installed.
unit: $(VENV)/.extra-flower
	@[ -z "$$CI" ] || sh scripts/install-chromium.sh
	$(PY) -m pytest -n $(JOBS) --timeout 300 -q

test-slow: $(VENV)/.installed
	$(PY) -m pytest -n $(JOBS) --timeout 1800 -q -m "slow"

test-deploy: $(VENV)/.extra-simulation
	$(PY) -m pytest --timeout 1800 -q -m "deploy"

test-long: $(VENV)/.extra-simulation  ## fuzzing, kills, power cuts and every attack on real Flower: an hour or two
	$(PY) -m pytest --timeout 7200 -q -m "long"

studies: $(VENV)/.installed  ## every table and figure of the paper on digits: a minute or two
	$(VENV)/bin/pfedgate reproduce all --scale tiny

format: $(VENV)/.installed  ## rewrite the code in the house style
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

bench: $(VENV)/.installed  ## BENCH=step: one of benchmarks/
	$(PY) benchmarks/$(BENCH).py

docs: $(VENV)/.extra-docs  ## the documentation site, into site/
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --strict && echo "site/index.html"

# What a user gets: wheel and sdist, checked, installed where nothing of this folder is seen, and the demo run from there.
release-check: $(VENV)/.extra-release
	rm -rf dist build/release
	$(PY) -m build --quiet --outdir dist
	$(PY) -m twine check --strict dist/*
	for kind in whl tar.gz; do $(PY) scripts/release_check.py dist/*.$$kind || exit 1; done

clean:
	rm -rf $(VENV) build dist site .mypy_cache .pytest_cache .ruff_cache .hypothesis
