# run | test | types | lint | bench | chaos. Every target sets itself up; a second run reuses the set-up.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := run

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
SGLANG ?= .venv-sglang
SPEC ?= examples/quickstart.toml
PEERS ?= .venv-peers
TORCH ?= torch==2.13.0
MEGATRON ?= megatron-core==0.16.1
# where pip may also look for torch, for a CPU build that is ten times smaller: make run TORCH_FROM="--index-url ..."
TORCH_FROM ?=

HOME ?= /tmp
OMP_NUM_THREADS ?= 1
export HOME OMP_NUM_THREADS
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PIP_NO_INPUT := 1
export PIP_ROOT_USER_ACTION := ignore
# most of what is installed is never imported: the first process that imports a file compiles it for those after it
export PIP_NO_COMPILE := 1
unexport PYTHONDONTWRITEBYTECODE

.PHONY: run test fuzz test-browser pictures set-up-megatron test-megatron types lint bench chaos test-recovery clean sglang-venv peers-venv test-sglang test-chart test-cluster dashboards

## train the quickstart to its end, with live progress and a report
run: $(VENV)/.installed
	$(BIN)/syncline run $(SPEC)

# suites of which several files may run at once, each worker with a Redis of its own; jobs wait half of their time, so two
# files of them do, too; what measures or storms runs alone
TOGETHER := $(addprefix tests/,chart contract dashboards environments exporting gateway lab ladder layout numerics) \
  $(addprefix tests/,reliability report rollout runtime scheduler security sync trainer transport)
JOBS := tests/cli tests/loop
PYTEST := $(BIN)/python -m pytest -q -m "not long and not sglang and not megatron and not browser and not cluster" --durations=15

## everything that must hold before a change goes in
test: $(VENV)/.installed-dev lint types
	failed=0; \
	$(PYTEST) -n auto --maxprocesses 8 --dist loadfile $(TOGETHER) || failed=$$?; \
	$(PYTEST) -n 2 --dist loadfile $(JOBS) || failed=$$?; \
	$(PYTEST) $(addprefix --ignore=,$(TOGETHER) $(JOBS)) || failed=$$?; \
	exit $$failed

## megatron-core, into the environment of the tests
set-up-megatron: $(VENV)/.installed-megatron

## SGLang's own environment: 2.8 GB, apart from ours, since it pins other releases
sglang-venv: $(SGLANG)/.installed

## what bench/ measures against, in an environment apart: Ray, TransferQueue, redis-py, TRL (2 GB)
peers-venv: $(PEERS)/.installed

## what needs a real SGLang server, and jobs that have both production engines
test-sglang: $(VENV)/.installed-megatron $(SGLANG)/.installed
	SYNCLINE_SGLANG=$(SGLANG)/bin/python $(BIN)/python -m pytest -q tests/sglang -m "not long" --durations=15

types: $(VENV)/.installed-dev
	$(BIN)/mypy services rollout_svc trainer_svc sync_svc scheduler lab
	MYPYPATH=bench $(BIN)/mypy bench/*.py
	MYPYPATH=helm/dashboards $(BIN)/mypy helm/dashboards/*.py
	for suite in tests tests/*/; do \
	  compgen -G "$${suite%/}/*.py" >/dev/null || continue; \
	  own="$${suite%/}:"; [[ $$suite == tests/conformance/ ]] && own=; \
	  MYPYPATH="$${own}tests:tests/loop:tests/gateway:tests/chart:tests/reliability" $(BIN)/mypy "$${suite%/}"/*.py; \
	done

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

## the loop's own figures: a table, and as JSON in runs/bench.json
bench: $(VENV)/.installed
	mkdir -p runs
	$(BIN)/python bench/loop.py --json runs/bench.json

## the API under REQUESTS generated requests: none may be a server error; told in runs/fuzz.json
REQUESTS ?= 50000
fuzz: $(VENV)/.installed-dev
	REQUESTS=$(REQUESTS) $(BIN)/python -m pytest -q -m long tests/gateway/test_fuzz_api.py tests/gateway/test_fuzz_parsers.py

## faults of every kind for so many seconds, first on trainers and messages, then on the whole stack; what came of them is
## recorded in docs/reliability.json and docs/reliability.md. Another SEED is another schedule.
SECONDS ?= 600
SEED ?= 1
chaos: $(VENV)/.installed-dev
	$(BIN)/python tests/chaos/campaign.py --seconds $(SECONDS) --seed $(SEED)

## the long forms: recovery of the whole, every harm, every case that was once not survived
test-recovery: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -q -m long tests/chaos tests/reliability --durations=15

## the gateway's page in headless Chromium, over a real job
test-browser: $(VENV)/.installed-dev
	@command -v chromium >/dev/null || { [[ $$(id -u) -eq 0 ]] && apt-get update -qq && DEBIAN_FRONTEND=noninteractive \
	  apt-get install -y -qq --no-install-recommends chromium fonts-dejavu-core; } || { \
	  echo "this needs Chromium (Debian: apt-get install chromium fonts-dejavu-core)" >&2; exit 1; }
	$(BIN)/python -m pytest -q tests/ui -m browser --durations=15

## the same, keeping what docs/ui.md shows
pictures: export SYNCLINE_PICTURES := docs/images
pictures: test-browser

## the Megatron engine against megatron-core itself, on CPU: several ranks as processes
test-megatron: $(VENV)/.installed-megatron
	$(BIN)/python -m pytest -q tests/megatron --durations=15

## chart, images and compose file, the long form too: helm's test runs a job
test-chart: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -q tests/chart --durations=15

## write the chart's dashboards anew, from helm/dashboards
dashboards: $(VENV)/.installed-dev
	$(BIN)/python helm/dashboards/make.py

## jobs and the chart in a real control plane of Kubernetes, which the first run builds (12 minutes)
test-cluster: $(VENV)/.installed-dev
	tests/cluster/tools/control_plane.sh
	$(BIN)/python -m pytest -q tests/cluster --durations=15

clean:
	rm -rf $(VENV) $(SGLANG) $(PEERS) runs

# ---- set-up: done once, again only when pyproject.toml changes -------------------------------------------------
$(VENV)/.installed: pyproject.toml
	@echo "set-up 1/3: virtual environment in $(VENV)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || { \
	  rm -rf $(VENV); echo "python3 needs its venv module (Debian: apt-get install python3-venv)" >&2; exit 1; }
	@$(BIN)/python -c 'import sys; assert sys.version_info >= (3, 11), sys.version' || { \
	  echo "Python 3.11 or newer is needed: make PYTHON=python3.12" >&2; exit 1; }
	@echo "set-up 2/3: $(TORCH)"
	@$(BIN)/python -m pip install -q "$(TORCH)" $(TORCH_FROM)
	@echo "set-up 3/3: syncline and what it stands on"
	@$(BIN)/python -m pip install -q -e ".[fast]"
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	@echo "set-up of the tests"
	@$(BIN)/python -m pip install -q -e ".[dev]"
	@touch $@

$(VENV)/.installed-megatron: $(VENV)/.installed-dev
	@echo "set-up of $(MEGATRON)"
	@$(BIN)/python -m pip install -q -e ".[megatron]" "$(MEGATRON)"
	@touch $@

SGLANG_NEEDS := rollout_svc/syncline/rollout/engines/sglang/requirements.txt
$(SGLANG)/.installed: $(SGLANG_NEEDS)
	@echo "set-up of SGLang in $(SGLANG)"
	@test -x $(SGLANG)/bin/python || $(PYTHON) -m venv $(SGLANG)
	@$(SGLANG)/bin/python -m pip install -q "$(TORCH)" $(TORCH_FROM)
	@$(SGLANG)/bin/python -m pip install -q --no-deps -r $(SGLANG_NEEDS)
	@touch $@

$(PEERS)/.installed: bench/queue_peers.txt
	@echo "set-up of the bench's peers in $(PEERS)"
	@test -x $(PEERS)/bin/python || $(PYTHON) -m venv $(PEERS)
	@$(PEERS)/bin/python -m pip install -q "$(TORCH)" $(TORCH_FROM)
	@$(PEERS)/bin/python -m pip install -q -r bench/queue_peers.txt
	@touch $@
