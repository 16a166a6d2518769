# Thin over hatch: each target is one line; the scripts themselves are in pyproject.toml.
.DEFAULT_GOAL := setup
.PHONY: setup serve test test-lowest wheels manylinux distributions test-full test-speech test-avx2 test-reference faults soak fuzz mutate coverage clients check bench docs clean

PYTHON ?= python3
KERNELS := $(wildcard packages/kernels/src/llmstack_kernels/*/*.cpp packages/kernels/src/llmstack_kernels/*/*.h)
PROJECTS := pyproject.toml $(wildcard packages/*/pyproject.toml)
# Hatch lives in its own environment. tools/set_up.py makes .venv, in which hatch installs the developers' tools.
export HATCH_PYTHON := self
export HATCH_DATA_DIR := $(CURDIR)/.hatch/data
HATCH := .hatch/bin/hatch

setup: .venv/.synced
serve: .venv/.serving ; @exec .venv/bin/llmstack serve $(ARGS)
test: setup ; $(HATCH) run test $(ARGS)
test-lowest: $(HATCH) ; $(HATCH) run lowest:test $(ARGS)
test-full: setup ; $(HATCH) run test-full $(ARGS)
test-speech: setup ; $(HATCH) run test-speech $(ARGS)
test-avx2: setup ; $(HATCH) run test-avx2 $(ARGS)
test-reference: setup ; $(HATCH) run test-reference $(ARGS)
check: setup ; $(HATCH) run check
clients: setup ; $(HATCH) run clients $(ARGS)
faults: setup ; $(HATCH) run faults $(ARGS)
soak: setup ; $(HATCH) run soak
fuzz: setup ; $(HATCH) run fuzz
mutate: $(HATCH) ; $(HATCH) run mutate:mutate $(ARGS)
coverage: setup ; $(HATCH) run coverage $(ARGS)
docs: setup ; $(HATCH) run docs $(ARGS)
wheels: $(HATCH) ; rm -f dist/llmstack_*.whl && .hatch/bin/python -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir dist ./packages/*/
manylinux: $(HATCH) ; $(HATCH) run release:manylinux
distributions: $(HATCH) ; $(HATCH) run release:distributions $(TAG)
bench: setup ; $(HATCH) run bench $(ARGS)
clean: ; rm -rf .venv .venv-lowest .hatch .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis .benchmarks .site-check site dist packages/*/dist

$(HATCH): ; $(PYTHON) -m venv .hatch && .hatch/bin/python -m pip install --quiet "hatch>=1.18,<2"
.venv/.serving: $(PROJECTS) $(KERNELS) ; @$(PYTHON) tools/set_up.py serve
.venv/.synced: $(PROJECTS) $(KERNELS) ; @$(PYTHON) tools/set_up.py develop
