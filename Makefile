# Two commands to know: `make demo` and `make test`. Everything goes into .venv and runs/.
PYTHON ?= python3
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
# What the steps share (.venv, runs/) is made once; two at a time would also spoil every measured time.
.NOTPARALLEL:

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
INSTALLED := $(VENV)/.installed
INSTALLED_TEST := $(VENV)/.installed-test
PROTOS := elastic/control.proto
PROTOC = $(BIN)/python -m grpc_tools.protoc -I.
SOURCES := reshard snapshot elastic controller_adapter chaos tests benchmarks examples .ci
BENCHES = $(sort $(wildcard benchmarks/bench_*.py))
PYTEST := $(BIN)/python -m pytest
TEST_PROCESSES ?= 2

.PHONY: help demo test test-real test-all check format format-check lint types imports proto proto-check bench clean

help: ## Show this list
	@grep -hE '^[.a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([.a-z-]+):.*## (.*)/  make \1|\2/' | column -t -s '|'

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "Python 3.11 or newer is needed; name one: make PYTHON=/path/to/python3 $(MAKECMDGOALS)" >&2; exit 2; }
	@$(PYTHON) -m venv $(VENV) \
		|| { rm -rf $(VENV); echo "$(PYTHON) cannot make a virtual environment (on Debian: install python3-venv)" >&2; exit 2; }

$(INSTALLED): pyproject.toml | $(BIN)/python
	@echo "Installing into $(VENV) (once; a minute or two)"
	$(PIP) install --editable .
	@touch $@

$(INSTALLED_TEST): pyproject.toml | $(BIN)/python
	@echo "Installing with test tools into $(VENV) (once; a minute or two)"
	$(PIP) install --editable '.[test]'
	@touch $@ $(INSTALLED)

.venv: $(INSTALLED) ## Make the virtual environment and install this project into it

demo: $(INSTALLED) ## Train on 3 slices, kill one, watch the recovery (ARGS="--steps 100 …" adds flags)
	$(BIN)/elastic demo --out runs/demo $(ARGS)

test: $(INSTALLED_TEST) ## Run the tests (at most 5 minutes; ARGS="-k name" narrows, TEST_PROCESSES=0 is one process)
	$(PYTEST) -m "not slow and not soak" -n $(TEST_PROCESSES) --dist loadfile $(ARGS)

test-real: $(INSTALLED_TEST) ## One draw of each family of faults on real processes (those that make test leaves out)
	$(PYTEST) -m "real and slow and not soak" --draw $(ARGS)

test-all: $(INSTALLED_TEST) ## Every test, the long ones too
	HYPOTHESIS_PROFILE=deep $(PYTEST) $(ARGS)

check: format-check lint types imports proto-check test ## All that CI checks before it runs real processes

format: $(INSTALLED_TEST) ## Rewrite the code in the project's format
	$(BIN)/ruff format $(SOURCES)
	$(BIN)/ruff check --fix-only $(SOURCES)

format-check: $(INSTALLED_TEST)
	$(BIN)/ruff format --check $(SOURCES)

lint: $(INSTALLED_TEST)
	$(BIN)/ruff check $(SOURCES)

types: $(INSTALLED_TEST)
	$(BIN)/mypy

imports: $(INSTALLED_TEST)
	$(BIN)/lint-imports

proto: $(INSTALLED_TEST) ## Generate the Python code of the protocol files
	@for proto in $(wildcard $(PROTOS)); do \
		$(PROTOC) --python_out=. --pyi_out=. --grpc_python_out=. $$proto; echo "generated from $$proto"; \
	done

proto-check: $(INSTALLED_TEST)
	@fresh=$$(mktemp -d); trap 'rm -rf $$fresh' EXIT; \
	for proto in $(wildcard $(PROTOS)); do \
		$(PROTOC) --python_out=$$fresh --pyi_out=$$fresh --grpc_python_out=$$fresh $$proto; \
		for file in $${proto%.proto}_pb2.py $${proto%.proto}_pb2.pyi $${proto%.proto}_pb2_grpc.py; do \
			diff -u $$file $$fresh/$$file || { echo "$$file is not what $$proto generates: run make proto" >&2; exit 1; }; \
		done; echo "$$proto: generated code is current"; \
	done

bench: $(INSTALLED_TEST) ## Run the benchmarks (SMOKE=1: small)
	@mkdir -p runs/bench
	@for bench in $(BENCHES); do echo "== $$bench"; $(BIN)/python $$bench $(if $(SMOKE),--smoke) $(ARGS); done

clean: ## Remove .venv, runs/ and caches
	rm -rf $(VENV) runs build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
