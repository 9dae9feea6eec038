# Everything a newcomer needs: `make demo`, `make test`. The environment is made on the way.
VENV ?= .venv
PYTHON ?= python3
# What pip is asked for when the environment has no torch yet. It may hold pip's own options, so a build for
# a given accelerator can be named: make demo TORCH="--index-url <index of that build> torch==2.13.0"
TORCH ?= torch==2.13.0
BENCH ?= --shape tiny --peers transformers
GPU ?=
SERVE ?=

bin := $(VENV)/bin
stamp := $(VENV)/.specdec-installed
workers := -n auto --maxprocesses 8 --dist worksteal

# What a recipe begins with that runs PYTHON itself.
define new_python
@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
  echo "specdec needs Python 3.11 or newer; '$(PYTHON)' is missing or older." \
       "Name another with: make $(or $(MAKECMDGOALS),demo) PYTHON=python3.12" >&2; exit 1; }
endef

.PHONY: help demo serve quick test test-all isa parity check map docs bench gpu clean
.DEFAULT_GOAL := help

help:
	@echo "make demo    set up, then stream a completion in this terminal"
	@echo "make serve   set up, then serve the shipped model over HTTP (SERVE=\"...\" for options)"
	@echo "make quick   set up, then run the fastest tests of each package: about a minute"
	@echo "make test    set up, then run a part of the test matrix: about ten minutes on two cores"
	@echo "make test-all  set up, then run the full test matrix, as CI does"
	@echo "make isa     set up, then run CPU-dependent tests with newer CPU features switched off"
	@echo "make parity  set up, then compare one configuration per family with the other supported transformers"
	@echo "make check   ruff, mypy --strict and the import rule"
	@echo "make map     draw docs/map.svg, the packages and their imports"
	@echo "make docs    build the documentation as a site, in site/"
	@echo "make bench   throughput beside transformers (BENCH=\"...\" for other settings)"
	@echo "make gpu     on a machine with an NVIDIA GPU: all checks and benchmarks, 9 minutes, PYTHON's own packages"
	@echo "make clean   remove the environment and what tools left behind"

demo: $(stamp)
	@$(bin)/specdec demo

serve: $(stamp)
	@$(bin)/specdec serve tiny $(SERVE)

# The unit tests of each package, and a few cells of losslessness, on the host and on the device.
lossless := tests/lossless/test_lossless.py::test_every_supported_cell_equals_plain_decoding
quick := tests/test_imports.py tests/test_repository.py tests/config tests/state_slots tests/verify tests/draft \
  $(addprefix tests/kernels/test_,conv.py norm.py recurrence.py sampling.py tree.py) tests/models/test_families.py \
  $(addprefix tests/core/test_,counts.py scheduler.py) tests/setup/test_resolve.py tests/setup/test_footprint.py \
  $(addprefix tests/text/test_,chat.py grammars.py text.py) tests/engine/test_engine.py tests/engine/test_completions.py \
  tests/server/test_bodies.py tests/server/test_protocol.py tests/bench/test_report.py tests/bench/test_plots.py \
  "$(lossless)[qwen3_5-mtp-tree-record-host]" "$(lossless)[nemotron_h-suffix-tree-snapshot-device]"
not_quick := $(addprefix --ignore=tests/,draft/test_unrolled.py draft/test_policy.py state_slots/prefix/test_cache.py)

quick: $(stamp)
	OMP_NUM_THREADS=1 $(bin)/pytest -q -m "not exhaustive" $(workers) $(quick) $(not_quick)

# The first line of the output says what the CPU has, and which C kernels run on it.
test: $(stamp)
	OMP_NUM_THREADS=1 $(bin)/pytest -m "not exhaustive" $(workers)

test-all: $(stamp)
	OMP_NUM_THREADS=1 $(bin)/pytest $(workers)

# Without units for bfloat16, and with AVX2 alone: tests/processors.py has the list.
isa: $(stamp)
	OMP_NUM_THREADS=1 $(bin)/python -m tests.processors $(workers)

# Logits beside the oldest and the newest supported transformers, but the installed one; downloads them.
parity: $(stamp)
	OMP_NUM_THREADS=1 $(bin)/python -m tests.transformers_versions $(workers)

check: $(stamp)
	$(bin)/ruff check
	$(bin)/ruff format --check
	$(bin)/mypy
	$(bin)/pytest -q tests/test_imports.py

map: $(stamp)
	@$(bin)/python -m tests.map

# --strict: a broken link, a missing anchor or a page without a place in the navigation is an error.
docs: $(stamp)
	@$(bin)/python -c 'import mkdocs, material' 2>/dev/null || $(bin)/python -m pip install -q -e '.[docs]'
	$(bin)/python -m mkdocs build --strict

bench: $(stamp)
	@$(bin)/specdec bench throughput $(BENCH)

# On a machine that has torch for its GPU already: nothing is installed. GPU="--dry-run" only shows the plan.
# The environment's Python where there is one, unless another is named.
gpu: gpu_python = $(if $(and $(wildcard $(bin)/python),$(filter file,$(origin PYTHON))),$(bin)/python,$(PYTHON))
gpu:
	$(new_python)
	@$(gpu_python) -m tools.gpu $(GPU)

clean:
	rm -rf $(VENV) build dist site *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find specdec tests -name __pycache__ -type d -prune -exec rm -rf {} +

$(bin)/python:
	$(new_python)
	$(PYTHON) -m venv $(VENV)

# Torch comes first and by itself: what depends on it then finds one, and pulls no second build.
$(stamp): pyproject.toml | $(bin)/python
	@$(bin)/python -m pip show -q torch 2>/dev/null || $(bin)/python -m pip install $(TORCH)
	$(bin)/python -m pip install -q -e '.[test]'
	@touch $@
