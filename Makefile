# The whole study. `make study` and `make test` set up what they need by themselves.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
CONSTRAIN ?= --constraint constraints.txt  # empty for whatever is newest, or for a Python other than 3.11
ARMS := single ddp zero1 zero2 zero3 zero1_cpu zero2_cpu zero3_cpu zero3_nvme
NOW := $(shell date -u +%Y%m%d-%H%M%S)
RUNS ?= runs/study-$(NOW)
export PATH := $(abspath $(BIN)):$(PATH)

.PHONY: help setup study test check bench parity

help:  ## this list
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## /  make \1\t/' | expand -t 16

setup: $(VENV)/.ready  ## install into .venv, and compile DeepSpeed's operators

$(VENV)/.ready: pyproject.toml constraints.txt
	@echo "setting up $(VENV), once: first PyTorch, then the other packages, then DeepSpeed's operators"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet $(CONSTRAIN) torch
	$(BIN)/python -m pip install --quiet $(CONSTRAIN) --editable '.[test]'
	$(BIN)/python -m study.operators
	@touch $@

study: setup  ## train every arm on the embedded corpus, and compare
	@failed=; for arm in $(ARMS); do \
	  accelerate launch --config_file accelerate_configs/$$arm.yaml study/train.py --run-dir $(RUNS)/$$arm \
	    || grep -q '"status": "unavailable"' $(RUNS)/$$arm/record.json || failed="$$failed $$arm"; \
	done; study runs $(RUNS); test -z "$$failed" || { echo "did not finish:$$failed"; exit 1; }

test: setup  ## every test that needs no GPU, the slow ones left out
	pytest -m "not slow and not gpu"

check: setup  ## lint, and every test, the slow ones as well
	ruff check && ruff format --check && pytest -m "not gpu"

parity: setup  ## the losses of all arms against DDP's: both tasks, three precisions, accumulation 1 and 4 (an hour)
	pytest -m slow tests/test_parity.py

bench: setup  ## this trainer against a bare loop and the Hugging Face Trainer
	python -m study.bench
