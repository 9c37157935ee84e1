# make demo: a real answer from a fresh clone. make test: everything that must hold. make help: the rest.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
PYTEST := $(BIN)/python -m pytest
QUICK := not slow and not soak and not gpu
SUDO ?= $(if $(filter 0,$(shell id -u)),,sudo)
WORKERS ?= 2
SPREAD := -n $(WORKERS) --dist loadfile --no-loadscope-reorder

.DEFAULT_GOAL := help
.PHONY: help demo test test-all soak nixl clients gateways gpu bench-cpu bench-gpu bench-gateway bench-prefix lint protos docs lock clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "twostroke needs Python 3.11 or newer; name one: make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.run: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) install -c constraints.txt -e .
	@touch $@

$(VENV)/.dev: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) install -c constraints.txt -e '.[dev]'
	@touch $@ $(VENV)/.run

demo: $(VENV)/.run ## install, fetch the model, start the stack, stream one answer, stop
	@$(BIN)/python scripts/demo.py

lint: $(VENV)/.dev ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: lint ## lint, then every test that needs neither a GPU, other people's clients nor long; WORKERS=0: in one process
	$(PYTEST) -m "$(QUICK)" $(SPREAD) --ignore tests/clients

test-all: lint ## the long ones too
	$(PYTEST) -m "not soak and not gpu"

soak: $(VENV)/.dev ## hours of load and faults
	$(PYTEST) -m soak --timeout 14400

nixl: $(VENV)/.dev ## the tests of KV between hosts; installs the extra that they need
	$(PIP) install -q -c constraints.txt -e '.[nixl]'
	$(PYTEST) -m "$(QUICK)" tests/kvtransfer/test_nixl.py tests/services/test_handover_nixl.py tests/e2e/test_nixl.py

clients: $(VENV)/.dev ## other people's clients against real processes; builds an environment for each
	$(BIN)/python scripts/clients.py
	$(PYTEST) tests/clients

gateways: $(VENV)/.dev ## Envoy, nginx, HAProxy and Caddy in front of real processes; installs what is missing (apt-get)
	$(BIN)/python scripts/clients.py envoy
	@PATH=$$PATH:/usr/sbin; command -v nginx && command -v haproxy && command -v caddy || \
	  $(SUDO) apt-get install -y --no-install-recommends nginx haproxy caddy
	$(PYTEST) tests/gateways

gpu: $(VENV)/.dev ## the tests that need a CUDA device
	$(PYTEST) -m gpu

bench-cpu: $(VENV)/.dev ## against transformers on this machine's cores
	$(BIN)/python benchmarks/cpu.py
	$(BIN)/python benchmarks/report.py

bench-gpu: $(VENV)/.dev ## the engine alone on one GPU, and decoding beside long prompts; about three minutes
	$(BIN)/python benchmarks/gpu.py
	$(BIN)/python benchmarks/gpu_mixed.py
	$(PIP) install -q -c constraints.txt -e '.[bench]'
	$(BIN)/python benchmarks/plot_mixed.py
	$(BIN)/python benchmarks/report.py

bench-gateway: $(VENV)/.dev ## a gateway on one core: messages, tokens, events a second, added latency, memory
	$(BIN)/python benchmarks/gateway.py

bench-prefix: $(VENV)/.dev ## warm and cold caches, routing by prefix and at random
	$(BIN)/python benchmarks/prefix.py

protos: $(VENV)/.dev ## regenerate what is made of protos/
	$(BIN)/python scripts/protos.py src
	$(BIN)/python scripts/descriptors.py

docs: $(VENV)/.dev ## regenerate docs/configuration.md from the settings' schema, docs/openapi.json from the fields
	$(BIN)/python scripts/configuration.py docs/configuration.md
	$(BIN)/python scripts/openapi.py docs/openapi.json

lock: ## renew constraints.txt from pyproject.toml
	$(PYTHON) scripts/lock.py constraints.txt

clean: ## remove what was built; the model cache stays
	rm -rf $(VENV) .clients build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis src/*.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
