# Thin over hatch: each target is one line; the scripts themselves are in pyproject.toml.
.DEFAULT_GOAL := setup
.PHONY: setup serve test test-full check bench clean

PYTHON ?= python3
KERNELS := $(wildcard packages/kernels/src/llmstack_kernels/*/*.cpp packages/kernels/src/llmstack_kernels/*/*.h)
PROJECTS := pyproject.toml $(wildcard packages/*/pyproject.toml)
# Hatch lives in its own environment and makes .venv itself: in one made beforehand it would install nothing.
export HATCH_PYTHON := self
export HATCH_DATA_DIR := $(CURDIR)/.hatch/data
HATCH := .hatch/bin/hatch

setup: .venv/.synced
serve: setup ; @exec .venv/bin/llmstack serve $(ARGS)
test: setup ; $(HATCH) run test $(ARGS)
test-full: setup ; $(HATCH) run test-full $(ARGS)
check: setup ; $(HATCH) run check
bench: setup ; $(HATCH) run bench $(ARGS)
clean: ; rm -rf .venv .hatch .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis .benchmarks dist packages/*/dist

$(HATCH): ; $(PYTHON) -m venv .hatch && .hatch/bin/python -m pip install --quiet "hatch>=1.18,<2"
.venv/.synced: $(PROJECTS) $(KERNELS) | $(HATCH) ; $(HATCH) run sync && touch $@
