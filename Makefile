# Two commands for a newcomer: `make demo` and `make test`. `make help` lists the rest.
#   make PIP_ARGS="--index-url URL"   passes pip another index, for another torch build
#   make PYTHON=python3.12            chooses the interpreter

PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(not (3,11) <= sys.version_info[:2] <= (3,13))' 2>/dev/null && echo $$p && break; done)
PIP_ARGS ?=
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: help install demo test test-slow test-gpu chaos check format audit demo-model demo-model-eval wheel clean
help:
	@echo "make demo             install, start a cluster on this machine, transcribe three recordings"
	@echo "make test             the fast test suite"
	@echo "make test-slow        everything that takes longer"
	@echo "make test-gpu         what needs a CUDA device (with flashinfer: pip install -e '.[gpu]')"
	@echo "make chaos            faults under load, one after another and in pairs (40 minutes; root for all)"
	@echo "make check            format, lint, types, import rules"
	@echo "make format           rewrite files as 'make check' wants them"
	@echo "make audit            compare constraints.txt with public advisories (needs the network)"
	@echo "make demo-model       train the bundled checkpoint again (hours; needs espeak-ng and flite)"
	@echo "make demo-model-eval  measure the bundled checkpoint (needs espeak-ng and flite)"
	@echo "make wheel            build dist/splitscribe-*.whl, which the hosts of a cluster install"

install: $(STAMP)
$(STAMP): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "splitscribe needs Python 3.11 to 3.13: install python3.11 (Debian, Ubuntu: apt-get install python3)"; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { echo "Python's venv module is missing: apt-get install python3-venv"; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Installing splitscribe into $(VENV) (a few minutes the first time)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) -c constraints.txt -e ".[dev]"
	@touch $(STAMP)

demo: install
	@$(BIN)/splitscribe demo

test: install
	$(BIN)/python -m pytest -m "not slow and not gpu"

test-slow: install
	$(BIN)/python -m pytest -m "slow and not gpu"

test-gpu: install
	$(BIN)/python -m pytest -m gpu

chaos: install
	$(BIN)/python -m tests.chaos --pairs 5
	$(BIN)/python -m tests.chaos --hosts

check: install
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: install
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

audit: install
	$(BIN)/python -m pip install --quiet --disable-pip-version-check pip-audit
	$(BIN)/python -m pip_audit --no-deps --disable-pip -r constraints.txt

SPEECH_TOOLS = $(foreach tool,espeak-ng flite,command -v $(tool) >/dev/null || { echo "$(tool) is missing: apt-get install espeak-ng flite"; exit 1; };)

demo-model: install
	@$(SPEECH_TOOLS)
	$(BIN)/python -m cluster.demo.recipe --work .demo-work

demo-model-eval: install
	@$(SPEECH_TOOLS)
	$(BIN)/python -m cluster.demo.recipe.evaluate

wheel: install
	@rm -f dist/splitscribe-*.whl
	$(BIN)/python -m pip wheel --quiet --no-deps -w dist .
	@cp constraints.txt dist/

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache
