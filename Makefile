# Two commands for a newcomer: `make demo` and `make test`. `make help` lists the rest.
#   make PIP_ARGS="--extra-index-url URL"   passes pip one more index, for another torch build
#   make PYTHON=python3.12            chooses the interpreter

PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(not (3,11) <= sys.version_info[:2] <= (3,13))' 2>/dev/null && echo $$p && break; done)
PIP_ARGS ?=
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
KIT_ARGS ?=

.PHONY: help install demo tools resolve openai-newest gpu-check-install gpu-kernels gpu-kit helm-check-install kernels manifests test test-in-order test-references test-unit test-slow fuzz test-gpu chaos check format audit demo-model demo-model-eval wheel image clean
help:
	@echo "make demo             install, start a cluster on this machine, transcribe three recordings"
	@echo "make check            format, lint, types, import rules"
	@echo "make test-unit        unit tests, for the inner loop"
	@echo "make test             the fast test suite: unit, parity, contract, end to end"
	@echo "make kernels          compile the CPU's kernels once, so that no test waits for them"
	@echo "make test-slow        everything that takes longer; GROUP=live for one group of: $(SLOW_GROUPS)"
	@echo "make fuzz             whatever clients may send: generated requests, broken bytes and audio, floods"
	@echo "make test-gpu         what needs a CUDA device (with flashinfer: pip install -e '.[gpu]')"
	@echo "make resolve          whether the pinned versions resolve from PyPI alone (needs the network)"
	@echo "make openai-newest    whether the newest openai package has fields that the server does not know (needs the network)"
	@echo "make gpu-check-install  fetch flashinfer's Python (66 MB), against which tests check our calls"
	@echo "make gpu-kernels      compile flashinfer's kernels for sm_80, sm_89, sm_90a, without a GPU"
	@echo "make gpu-kit          wheels for a GPU machine without a network, into dist/gpu-kit (KIT_ARGS=...)"
	@echo "make manifests        render the Helm chart into configs/kubernetes.yaml and configs/kuberay.yaml"
	@echo "make chaos            faults under load (35 minutes; root for all); PART=kept for one of: $(CHAOS_PARTS)"
	@echo "make tools            install the programs that tests call, with apt-get"
	@echo "make format           rewrite files as 'make check' wants them"
	@echo "make audit            compare constraints.txt with public advisories (needs the network)"
	@echo "make demo-model       train the bundled checkpoint again (hours; needs what make tools installs)"
	@echo "make demo-model-eval  measure the bundled checkpoint (needs what make tools installs)"
	@echo "make wheel            build dist/splitscribe-*.whl, which the hosts of a cluster install; its SBOM and checksums"
	@echo "make image            the wheel, and of it the image splitscribe:cpu (IMAGE=cuda), its id, SBOM and checksums"

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

AS_ROOT := $(shell test "$$(id -u)" = 0 || echo sudo)
APT_INSTALL := $(AS_ROOT) env DEBIAN_FRONTEND=noninteractive apt-get install --yes --quiet --no-install-recommends
tools: install
	@command -v apt-get >/dev/null || { echo "make tools needs apt-get (Debian, Ubuntu)"; exit 1; }
	@packages=$$($(BIN)/python -m tests.support.programs); \
	if test -z "$$packages"; then echo "Every program that the tests call is installed."; exit; fi; \
	echo "Tests call these packages' programs; apt-get installs them: $$packages"; \
	echo "(with systemd some start as services; to stop them: systemctl disable --now nginx prometheus ssh)"; \
	$(AS_ROOT) apt-get update --quiet; \
	for package in $$packages; do $(APT_INSTALL) $$package || failed="$$failed $$package"; done; \
	test -z "$$failed" || { echo "Not installed:$$failed"; exit 1; }

resolve: install
	@$(BIN)/python -m tests.support.resolution

openai-newest: install
	@rm -rf .openai-newest
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --target .openai-newest openai
	PYTHONPATH=.openai-newest $(BIN)/python -m pytest tests/unit/router/api/test_sdk_fields.py

# Without their dependencies, into a folder of their own: see pyproject.toml's extras of these names.
gpu-check-install: install
	@$(BIN)/python -m tests.gpu_kit.packages gpu-check --pip-args '$(PIP_ARGS)'

gpu-kernels: install
	@$(BIN)/python -m tests.gpu_kit.packages gpu-check gpu-kernels --pip-args '$(PIP_ARGS)'
	@$(BIN)/python -m tests.gpu_kit.kernels

# KIT_ARGS="--python 3.12 --arch 8.9": for another machine; python -m tests.gpu_kit --help
gpu-kit: install
	@$(BIN)/python -m tests.gpu_kit.packages gpu-check gpu-kernels --pip-args '$(PIP_ARGS)'
	@$(BIN)/python -m tests.gpu_kit $(KIT_ARGS)

helm-check-install: install
	@$(BIN)/python -m tests.gpu_kit.packages helm-check --folder .helm-check --pip-args '$(PIP_ARGS)'

manifests: helm-check-install
	@$(BIN)/python -m tests.support.helm

FAST := -m "not slow and not gpu"

# A file's tests stay in one process. What starts servers has the machine to itself, but for the
# comparisons with the references, which compute in what time that leaves: Linux shares the cores out
# between sessions first, so they are in one of their own, with the least weight.
IN_PARALLEL := -n auto --maxprocesses 8 --dist loadfile
SERVERS := tests/chaos tests/contract tests/e2e
REFERENCES := tests/parity

# Compiled once and kept: else the first tests that use one, and the first servers, wait for it.
kernels: install
	@$(BIN)/splitscribe check --compile

test: install
	@$(MAKE) --no-print-directory --jobs 2 --keep-going test-in-order test-references

test-in-order: install
	$(BIN)/python -m pytest $(FAST) --durations=10 $(IN_PARALLEL) $(patsubst %,--ignore=%,$(SERVERS) $(REFERENCES))
	$(BIN)/python -m pytest $(FAST) --durations=10 $(SERVERS)

# Shown when they have ended, so that two sets of tests do not write between each other's lines.
test-references: install
	@echo "The comparisons with the references run beside the tests, and are shown when they end."
	@log=$$(mktemp); setsid --wait sh -c 'echo 19 2>/dev/null >/proc/self/autogroup; exec nice -n 19 "$$@"' - \
		$(BIN)/python -m pytest $(FAST) --durations=10 -o timeout=900 $(REFERENCES) >$$log 2>&1; \
		status=$$?; cat $$log; rm -f $$log; exit $$status

test-unit: install
	$(BIN)/python -m pytest $(FAST) $(IN_PARALLEL) tests/unit

# Each group but grid and soak is meant to take less than 20 minutes on two cores: grid plays servers'
# whole loads in real time. A test keeps the groups complete.
SLOW_unit := tests/unit tests/parity tests/contract
SLOW_http := tests/e2e/http $(wildcard tests/e2e/test_*.py)
SLOW_archives := tests/e2e/archives
SLOW_live := tests/e2e/live
SLOW_page := tests/e2e/page
SLOW_operation := $(filter-out %/test_signals.py %/test_simulated_grid.py,$(wildcard tests/e2e/operation/test_*.py))
SLOW_signals := tests/e2e/operation/test_signals.py
SLOW_grid := tests/e2e/operation/test_simulated_grid.py
SLOW_works-with := tests/e2e/works_with
SLOW_faults := tests/chaos/test_short.py tests/chaos/test_live.py
SLOW_soak := tests/chaos/test_soak.py
SLOW_GROUPS := unit http archives live page operation signals grid works-with faults soak
GROUP ?= $(SLOW_GROUPS)

test-slow: gpu-check-install helm-check-install
	@$(foreach group,$(GROUP),test -n "$(SLOW_$(group))" || { echo "no group $(group): $(SLOW_GROUPS)"; exit 1; };)
	$(BIN)/python -m pytest -m "slow and not gpu" $(foreach group,$(GROUP),$(SLOW_$(group)))

FUZZ := tests/e2e/http/test_schema_fuzz.py tests/e2e/http/test_fuzz_uploads.py \
	tests/e2e/http/test_floods.py tests/e2e/archives/test_batch_fuzz.py
fuzz: install
	$(BIN)/python -m pytest -m "not gpu" $(FUZZ)

test-gpu: install
	$(BIN)/python -m pytest -m gpu

CHAOS_single :=
CHAOS_pairs := --faults --pairs 5
CHAOS_kept := --kept --rate 4
CHAOS_hosts := --hosts
CHAOS_PARTS := single pairs kept hosts
PART ?= $(CHAOS_PARTS)

chaos: install
	@$(foreach part,$(PART),$(if $(filter $(part),$(CHAOS_PARTS)),,echo "no part $(part): $(CHAOS_PARTS)"; exit 1;))
	@set -e; $(foreach part,$(PART),echo "Faults: $(part)"; $(BIN)/python -m tests.chaos $(CHAOS_$(part));)

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

SPEECH_TOOLS = $(foreach tool,espeak-ng flite,command -v $(tool) >/dev/null || { echo "$(tool) is missing: make tools installs it"; exit 1; };)

demo-model: install
	@$(SPEECH_TOOLS)
	$(BIN)/python -m cluster.demo.recipe --work .demo-work

demo-model-eval: install
	@$(SPEECH_TOOLS)
	$(BIN)/python -m benchmark.accuracy.demo_model

wheel: install
	@rm -f dist/splitscribe-* dist/SHA256SUMS
	$(BIN)/python -m pip wheel --quiet --no-deps -w dist .
	@cp constraints.txt dist/
	@$(BIN)/python tests/support/sbom.py > dist/splitscribe-$(VERSION).cdx.json
	@$(CHECKSUMS)

# Nothing is pushed anywhere. The SBOM is of what is in the image.
VERSION = $(shell sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
CHECKSUMS = cd dist && sha256sum constraints.txt splitscribe-* > SHA256SUMS
IMAGE ?= cpu
RELEASE = splitscribe-$(VERSION)-$(IMAGE)
LABEL := --label org.opencontainers.image
image: wheel
	@command -v docker >/dev/null || { echo "make image needs docker"; exit 1; }
	docker build --file configs/docker/$(IMAGE).Dockerfile --tag splitscribe:$(IMAGE) --tag splitscribe:$(VERSION)-$(IMAGE) \
		$(LABEL).title=splitscribe $(LABEL).version=$(VERSION) $(LABEL).licenses=Apache-2.0 \
		$(LABEL).revision=$(shell git rev-parse HEAD) .
	@docker image inspect --format '{{.Id}}' splitscribe:$(IMAGE) > dist/$(RELEASE).image-id
	@docker run --rm --interactive splitscribe:$(IMAGE) python - < tests/support/sbom.py > dist/$(RELEASE).cdx.json
	@$(CHECKSUMS)

clean:
	rm -rf $(VENV) .gpu-check .helm-check .openai-newest .works-with build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache
