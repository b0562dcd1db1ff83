# A fresh machine needs Python 3.11 or newer and make; the first target that runs makes .venv.

# The Python that makes .venv.
PYTHON ?= python3
# The Python that makes .venv-newest. Empty: 3.13 or 3.12, from PATH or from pyenv.
PYTHON_NEWEST ?=
# More arguments to pytest, for example PYTEST_ARGS='-k rms_norm'.
PYTEST_ARGS ?=
# One process a core; a test file stays in one of them, with what its tests share. In the order of
# their names, because the longest file is an early one.
PYTEST := -m pytest -n auto --dist loadfile --no-loadscope-reorder

BIN := .venv/bin
PIP_INSTALL := -m pip install --disable-pip-version-check

.PHONY: help demo test lint format test-newest test-oldest clean

help: ## Show this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/\1|\2/p' Makefile | awk -F'|' '{printf "make %-12s %s\n", $$1, $$2}'

demo: .venv/installed ## The main job: a trained model in PyTorch and in JAX, layer by layer
	$(BIN)/jaxblock parity

test: lint ## Lint, types and all tests
	$(BIN)/python $(PYTEST) $(PYTEST_ARGS)

lint: .venv/installed ## ruff (rules and format) and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: .venv/installed ## Put the code into ruff's format and mend what it can mend
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# Without constraints.txt, and upgraded at every run: what a user who installs today would get.
test-newest: .venv-newest/bin/pip ## What needs no torch, on Python 3.12 or 3.13 with the newest jax and flax
	.venv-newest/bin/python $(PIP_INSTALL) --upgrade --upgrade-strategy eager -e '.[test]'
	.venv-newest/bin/python $(PYTEST) -m 'not torch' $(PYTEST_ARGS)

# Each `>=` of pyproject.toml read as `==`: the lower bounds hold, or this fails.
test-oldest: .venv-oldest/bin/pip ## What needs no torch, with every dependency at its lower bound
	sed -n 's/^ *"\([a-z-]*\)>=\([0-9.]*\)",$$/\1==\2/p' pyproject.toml >.venv-oldest/constraints.txt
	.venv-oldest/bin/python $(PIP_INSTALL) -c .venv-oldest/constraints.txt -e '.[test]'
	.venv-oldest/bin/python $(PYTEST) -m 'not torch' $(PYTEST_ARGS)

clean: ## Remove the environments, builds and caches
	rm -rf .venv .venv-newest .venv-oldest build dist .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The file `installed` is written last, so that an interrupted installation is taken up again.
.venv/installed: pyproject.toml constraints.txt
	@$(call check_python,$(PYTHON))
	@echo 'Installing into .venv: a few minutes the first time.'
	$(PYTHON) -m venv .venv
	$(BIN)/python $(PIP_INSTALL) -c constraints.txt -e '.[parity,bench,test]'
	@touch $@

.venv-newest/bin/pip:
	@pyenv_versions="$$(pyenv root 2>/dev/null)/versions"; \
	for python in $(or $(PYTHON_NEWEST),python3.13 python3.12 \
			"$$pyenv_versions"/3.13.*/bin/python "$$pyenv_versions"/3.12.*/bin/python); do \
		if "$$python" -c 'import sys, ensurepip; sys.exit(sys.version_info < (3, 12))' 2>/dev/null; then \
			echo "Making .venv-newest with $$python"; exec "$$python" -m venv .venv-newest; \
		fi; \
	done; \
	echo 'make test-newest needs Python 3.12 or 3.13, with venv: name one, PYTHON_NEWEST=...' >&2; exit 1

.venv-oldest/bin/pip:
	@$(call check_python,$(PYTHON))
	$(PYTHON) -m venv .venv-oldest

check_python = \
	fail() { echo "jaxblock needs Python 3.11 or newer, with venv; got $$1" >&2; exit 1; }; \
	command -v $(1) >/dev/null || fail 'no $(1). Name one: make PYTHON=...'; \
	$(1) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| fail "$(1), $$($(1) -V 2>&1). Name another: make PYTHON=..."; \
	$(1) -c 'import venv, ensurepip' 2>/dev/null \
		|| fail '$(1) without venv. On Debian and Ubuntu: apt install python3-venv'
