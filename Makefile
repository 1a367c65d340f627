# Every task of the project. `make` alone lists them.
#
# Needs Python 3.11+, cargo, Node and Java 17; everything else is installed below .venv, .tools and
# tests/js/node_modules. Stamps make each step a no-op when nothing it depends on has changed.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.NOTPARALLEL:
.DELETE_ON_ERROR:

PYTHON ?= python3
ARGS ?=
UV_VERSION := 0.13.7

# uv from PATH if there is one, else a private copy installed by pip.
UV := $(or $(shell command -v uv 2>/dev/null),.tools/bin/uv)
VENV := .venv
BIN := $(VENV)/bin
LOCKED := $(if $(wildcard Cargo.lock),--locked)

SYNCED := $(VENV)/.synced
BUILT := $(VENV)/.built
NODE_READY := tests/js/node_modules/.ready
# What a new installation depends on; when only the engine's sources changed, the library is replaced in place.
INSTALL_INPUTS := $(SYNCED) pyproject.toml
ENGINE_SOURCES := $(shell find engine -type f \( -name '*.rs' -o -name Cargo.toml \) 2>/dev/null)

# The engine is compiled against the interpreter of the environment, in every cargo call alike.
export PYO3_PYTHON := $(CURDIR)/$(BIN)/python
# A virtual environment of the caller's shell must not take the place of ours.
unexport VIRTUAL_ENV
unexport PYTHONPATH
# Tests start a thousand processes: each would compile every module again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help
help: ## List the tasks
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-10s %s\n", $$1, $$2}'

# --- environment and build ---------------------------------------------------------------------

.tools/bin/uv:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo 'error: Python 3.11 or newer is needed; name one with `make PYTHON=/path/to/python3`' >&2; exit 1; }
	$(PYTHON) -m venv .tools
	.tools/bin/python -m pip install --quiet --disable-pip-version-check uv==$(UV_VERSION)

$(SYNCED): requirements.lock | $(UV)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo 'error: Python 3.11 or newer is needed; name one with `make PYTHON=/path/to/python3`' >&2; exit 1; }
	test -x $(BIN)/python || $(UV) venv --quiet --python "$$(command -v $(PYTHON))" $(VENV)
	$(UV) pip sync --quiet --require-hashes --python $(BIN)/python requirements.lock
	@touch $@

$(BUILT): $(INSTALL_INPUTS) Cargo.toml $(wildcard Cargo.lock) $(ENGINE_SOURCES)
	@command -v cargo >/dev/null || { echo 'error: cargo is needed to build the engine' >&2; exit 1; }
	PATH="$(CURDIR)/$(BIN):$(CURDIR)/.tools/bin:$$PATH" VIRTUAL_ENV="$(CURDIR)/$(VENV)" \
	UV_CONSTRAINT=requirements.lock \
	  $(BIN)/maturin develop --uv --release --quiet $(LOCKED) \
	  $(if $(filter $(INSTALL_INPUTS),$?),,--skip-install)
	@touch $@

$(NODE_READY): tests/js/package.json tests/js/package-lock.json
	@command -v npm >/dev/null || { echo 'error: Node with npm is needed for the JavaScript clients and the conformance suite' >&2; exit 1; }
	cd tests/js && npm ci --ignore-scripts --no-audit --no-fund --loglevel=error
	@touch $@

.PHONY: setup build chromium lock
setup: $(SYNCED) $(NODE_READY) chromium ## Install what the tests need
build: $(BUILT) ## Build the engine into .venv (release)

chromium:
	@command -v chromium >/dev/null || command -v chromium-browser >/dev/null || \
	{ if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	    apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium >/dev/null; \
	  else \
	    echo 'error: the browser test needs Chromium: install the package `chromium` (as root: apt-get install chromium)' >&2; exit 1; \
	  fi; }

lock: | $(UV) ## Write the lock files anew (versions move only here)
	$(UV) pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-emit-index-url \
	  --no-header --no-annotate --group dev --output-file requirements.lock pyproject.toml
	cd tests/js && npm install --package-lock-only --ignore-scripts
	cargo update --workspace

# --- running -----------------------------------------------------------------------------------

.PHONY: run
run: $(BUILT) ## Build and serve on 127.0.0.1:4437 (ARGS="--port 0" passes flags)
	@exec $(BIN)/millstream serve $(ARGS)

# --- checking ----------------------------------------------------------------------------------

.PHONY: lint fmt test test-rust test-python test-full soak
lint: $(BUILT) ## Formatting, types, clippy, import layers, house rules
	$(BIN)/ruff check --quiet .
	$(BIN)/ruff format --quiet --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo
	$(BIN)/python tools/tidy.py
	$(BIN)/python tools/unasync.py --check
	cargo fmt --all --check
	cargo clippy --quiet --workspace --all-targets $(LOCKED) -- -D warnings
	cd bench/loadgen && cargo fmt --check && cargo clippy --quiet --all-targets --locked -- -D warnings

fmt: $(SYNCED) ## Format Python and Rust, and make the blocking client from the async one
	$(BIN)/ruff check --quiet --fix-only .
	$(BIN)/ruff format --quiet .
	$(BIN)/python tools/unasync.py
	cargo fmt --all
	cd bench/loadgen && cargo fmt

test-rust: $(SYNCED)
	cargo test --quiet --workspace --exclude millstream-sim $(LOCKED)
	cargo test --quiet --release -p millstream-sim $(LOCKED)

test-python: $(BUILT) setup
	$(BIN)/python tools/run_tests.py $(ARGS)

test: lint test-rust test-python ## Everything at its short counts

test-full: export MILLSTREAM_TEST_FULL = 1
test-full: export MILLSTREAM_SIM_SEEDS = 10000
test-full: lint test-rust test-python ## Everything at the full counts

soak: $(BUILT) setup ## Break the simulated disk for SOAK_SECONDS (default 1800), then real servers for SOAK_MINUTES (default 60)
	cargo run --quiet --release -p millstream-sim --bin simulate $(LOCKED) -- \
	  --seconds $${SOAK_SECONDS:-1800} $$(date +%s)000
	MILLSTREAM_TEST_FULL=1 MILLSTREAM_SOAK_MINUTES=$${SOAK_MINUTES:-60} \
	  $(BIN)/python -m pytest tests/crash -s $(ARGS)

.PHONY: bench clean
bench: $(BUILT) ## Measure against the other servers and print the ratios
	$(BIN)/python bench/compare.py $(ARGS)

clean: ## Remove everything that make built or installed
	rm -rf $(VENV) .tools target bench/loadgen/target dist tests/js/node_modules python/millstream/_engine*.so
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
	rm -rf .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
