# Every target works alone on a fresh clone: it makes .venv first if that is not there.
#   make demo | test | test-integration | test-all | test-versions | lint | types | docs | bench | clean
#   make test TESTS="tests/plan -x"     a part of the quick tiers
#   make test-versions VERSIONS="-k 2.11"   one version of PyTorch, see noxfile.py
#   PYTHON=python3.12 make test        another interpreter (3.11 and later)
#   make bench BENCH='--model bert-base --method "rockmate: 0.5"'
#   make demo DEMO="--budget 0.3 --steps 10"

PYTHON ?= python3
VENV ?= .venv
DEMO ?=
TESTS ?=
BENCH ?= --model gpt2-deep --method checkpoint --method "rockmate: 1.0" --method "rockmate: 0.5" --method "rockmate: minimum"

BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

TIERS := unit or model

VERSIONS ?=

.PHONY: demo test test-integration test-all test-versions lint types docs bench clean

demo: $(INSTALLED)
	$(BIN)/rockmate demo $(DEMO)

test-integration: TIERS := integration
test-all: TIERS := not cuda
test test-integration test-all: $(INSTALLED)
	$(BIN)/python -m pytest -n logical --dist worksteal -m "$(TIERS)" $(TESTS)

test-versions: $(INSTALLED)
	$(BIN)/python -m nox $(VERSIONS)

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check --quiet .
	$(BIN)/python -m bench.lines

types: $(INSTALLED)
	$(BIN)/pyright --pythonpath $(BIN)/python

docs: $(INSTALLED)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet

bench: $(INSTALLED)
	$(BIN)/python -m bench.compare --output bench-out/compared $(BENCH)

# torch first and by its pinned version, so that pip settles on one build before anything else asks for torch.
$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version.split()[0]; sys.exit(sys.version_info < (3, 11) and f"Python 3.11 or later is needed, $(PYTHON) is {v}: make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --constraint constraints.txt torch
	$(BIN)/python -m pip install --constraint constraints.txt --editable '.[dev]'
	@touch $@

clean:
	rm -rf $(VENV) demo-out bench-out site build dist *.egg-info .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
