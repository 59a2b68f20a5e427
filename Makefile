# One virtual environment, made once and remade only when what it is made from changed.
PYTHON ?= python3
BIN := .venv/bin
SHELL := /bin/bash

.PHONY: setup demo test test-slow test-tpu-compiler oracle soak lint bench bench-router

setup: .venv/installed

.venv/installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "tpuswarm needs Python 3.11 or later, $(PYTHON) is older: make PYTHON=python3.12 ..." >&2; exit 2; }
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev,plan,gcloud,wandb]'
	@touch $@

demo: setup
	@$(BIN)/tpuswarm demo

test: setup
	$(BIN)/pytest -n 2

test-slow: setup
	$(BIN)/pytest -m slow

test-tpu-compiler: setup
	$(BIN)/pytest -m tpu_compiler

oracle: setup .venv-oracle/installed
	$(BIN)/pytest -m oracle
	PYTHONPATH=src .venv-oracle/bin/python -m pytest tests/oracle

# Any build of torch will do; pip prefers the one for the CPU, 2.13.0+cpu, where an index has it.
.venv-oracle/installed: Makefile constraints.txt
	$(PYTHON) -m venv .venv-oracle
	.venv-oracle/bin/pip install --quiet --constraint constraints.txt hypothesis jax numpy pytest regex safetensors torch==2.13.0 transformers==5.23.0
	@touch $@

soak: setup
	$(BIN)/python -m benchmarks soak

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

bench: setup
	$(BIN)/python -m benchmarks

bench-router: setup
	$(BIN)/python -m benchmarks router
