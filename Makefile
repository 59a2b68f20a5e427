# One virtual environment, made once and remade only when what it is made from changed.
PYTHON ?= python3
BIN := .venv/bin
SHELL := /bin/bash

.PHONY: setup checkers demo demo-cloud demo-anywhere test test-slow test-all test-long test-real test-real-quick test-tpu-compiler oracle oracle-quick soak lint docs wheel bench bench-router

setup: .venv/installed

# The pip that comes with Python may be old: 23.2 takes three times as long as 26.3 to choose the versions.
.venv/installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "tpuswarm needs Python 3.11 or later, $(PYTHON) is older: make PYTHON=python3.12 ..." >&2; exit 2; }
	$(PYTHON) -m venv --upgrade-deps .venv
	$(BIN)/pip install --quiet --no-compile --constraint constraints.txt --editable '.[dev,plan,gcloud,wandb]'
	@touch $@

# axe, html-validate and Lighthouse for the tests of pages: 200 MB, by Node.js.
checkers: tests/checkers/node_modules/installed

tests/checkers/node_modules/installed: tests/checkers/package-lock.json
	npm ci --prefix tests/checkers --ignore-scripts --no-audit --no-fund
	@touch $@

demo: setup
	@$(BIN)/tpuswarm demo

demo-cloud: setup
	@$(BIN)/tpuswarm demo --cloud

demo-anywhere: setup
	@$(BIN)/tpuswarm demo --anywhere

# The quick files: everything broad. tests/conftest.py puts the files in order.
test: setup
	$(BIN)/pytest -n 2 --dist worksteal

test-slow: setup
	$(BIN)/pytest -m 'slow and not long' -n 2 --dist worksteal

# Both, the quick files first. Slow tests wait a third of the time: three workers keep two cores busy.
test-all: setup
	$(BIN)/pytest -m 'not long and not tpu_compiler and not real' -n 3 --dist worksteal

# Whole journeys, an hour: the commands of every page of docs/, a keeper on its head, one model over machines that come
# and go and over a bucket, a swarm that is killed and stopped at random. For changes to what they show; what they are
# made of is tested by test-all.
test-long: setup
	$(BIN)/pytest -m long -n 2 --dist worksteal

# Every command on real machines: containers with systemd, as root, with mmdebstrap and systemd-nspawn.
test-real: setup
	$(BIN)/pytest -m real tests/real -n 2 --dist loadfile

# Without the swarm.
test-real-quick: setup
	$(BIN)/pytest -m real tests/real --ignore tests/real/test_swarm.py -n 2 --dist loadfile

# The whole table of docs/plan.md, a quarter of an hour: for changes to plan/, train/ and recipes/.
test-tpu-compiler: setup
	$(BIN)/pytest -m tpu_compiler

ORACLE := PYTHONPATH=src .venv-oracle/bin/python -m pytest tests/oracle -n 2 --dist worksteal

# What recipes and PyTorch modules compute, beside torch and transformers: a quarter of an hour.
oracle: setup .venv-oracle/installed
	$(ORACLE) -m 'not torch_all'

# Without the samples of torch's operators, the layers and most of the random modules.
oracle-quick: setup .venv-oracle/installed
	$(ORACLE)

# The packages of .venv, and torch and what belongs to it, which nothing but the oracle may import. Any build of torch will
# do; pip prefers the one for the CPU, 2.13.0+cpu, where an index has it.
.venv-oracle/installed: .venv/installed Makefile
	$(PYTHON) -m venv --upgrade-deps .venv-oracle
	site=$$(.venv-oracle/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))') && \
	  echo "$${site/.venv-oracle/.venv}" > "$$site/packages_of_venv.pth"
	.venv-oracle/bin/pip install --quiet --no-compile --constraint constraints.txt torch==2.13.0 transformers==5.23.0 \
	  torchdata==0.11.0 datasets==5.2.0 grain==0.2.18 expecttest==0.3.0 peft==0.21.2
	@touch $@

soak: setup
	$(BIN)/python -m benchmarks soak

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

# The documents as a site in site/, with the reference that docs/site_hooks.py generates. A broken link is an error.
docs: setup
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# The demo from a wheel, in an environment that has the packages of .venv but not this folder.
wheel: setup
	rm -rf .venv-wheel
	$(PYTHON) -m venv .venv-wheel
	.venv-wheel/bin/pip wheel --quiet --no-deps --wheel-dir .venv-wheel/dist .
	.venv-wheel/bin/pip install --quiet --no-deps .venv-wheel/dist/*.whl
	site=$$(.venv-wheel/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))') && \
	  echo "$${site/.venv-wheel/.venv}" > "$$site/packages_of_venv.pth"
	cd .venv-wheel && bin/python -c 'import tpuswarm; assert ".venv-wheel" in tpuswarm.__file__' && bin/tpuswarm demo

bench: setup
	$(BIN)/python -m benchmarks

bench-router: setup
	$(BIN)/python -m benchmarks router
