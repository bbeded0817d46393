# What one runs here. Every target makes the virtual environment if need be, asks nothing and reads no standard input.
VENV ?= .venv
PYTHON ?= python3
BIN := $(VENV)/bin
RECIPE ?= recipes/swarm.toml

export PYTHON

.PHONY: help demo test test-slow lint types floors docs bench zoo study clients install dev clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 12

demo: $(VENV)/.demo ## train the swarm on two cores, in ten minutes at most, and print the table
	$(BIN)/inspan train $(RECIPE)

test: $(VENV)/.dev ## the fast tests, with coverage
	$(BIN)/python -m pytest -q --cov --cov-report=term

test-slow: $(VENV)/.dev ## every test, also those that take minutes
	$(BIN)/python -m pytest -q -m ""

lint: $(VENV)/.dev ## style
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.dev ## types
	$(BIN)/pyright --pythonpath $(BIN)/python

floors: $(VENV)/.dev ## a room imports only from floors below
	$(BIN)/lint-imports

docs: $(VENV)/.dev ## write docs/recipes.md anew
	$(BIN)/python -m inspan.config.reference > docs/recipes.md

bench: $(VENV)/.dev ## every benchmark, one JSON object a row
	$(BIN)/python -m benchmarks

zoo: $(VENV)/.dev ## faulty recipes beside their cures, and what the detectors see
	$(BIN)/python -m benchmarks.zoo

study: $(VENV)/.dev ## the arms of the README's table over three seeds; takes hours
	$(BIN)/python -m benchmarks.study

clients: ## install the agents of recipes/clients (CLIENTS="codex pi": only these)
	scripts/clients.sh $(CLIENTS)

install: $(VENV)/.demo ## what `make demo` needs
dev: $(VENV)/.dev ## what the tests and checks need

$(VENV)/.demo: pyproject.toml scripts/install.sh
	scripts/install.sh $(VENV) demo
	@touch $@

$(VENV)/.dev: pyproject.toml scripts/install.sh
	scripts/install.sh $(VENV) dev
	@touch $@ $(VENV)/.demo

clean: ## remove the virtual environments and caches (not the runs)
	rm -rf $(VENV) .clients .pytest_cache .ruff_cache .hypothesis .coverage .import_linter_cache
