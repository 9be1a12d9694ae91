# Two commands matter: `make quickstart` and `make test`. Both install what they need into .venv.
#
# TORCH is installed first and alone: the rest of the set then takes whatever build it brought
# (CUDA where your index serves one, CPU otherwise). PIP_ARGS reaches every pip call, e.g.
#   make install PIP_ARGS="--extra-index-url ..."

PYTHON ?= python3
TORCH ?= torch==2.13.0
PIP_ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS)
STAMP := $(VENV)/installed

.PHONY: quickstart test lint style types suite install clean help

help: ## List the targets
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | awk -F':.*## ' '{printf "  make %-12s %s\n", $$1, $$2}'

quickstart: $(STAMP) ## Regenerate, train, evaluate and promote a head for the embedded model
	$(BIN)/jetspec run quickstart

test: $(STAMP) style ## Check style, then types while every test runs
	@$(MAKE) --no-print-directory --jobs 2 types suite || { $(BIN)/mypy; false; } # told last

lint: style types ## Check style and types

style: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/mypy

suite: $(STAMP)
	$(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder

install: $(STAMP) ## Create .venv with everything in it

$(STAMP): pyproject.toml infra/constraints.txt
	@echo "installing into $(VENV) (about five minutes the first time)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) "$(TORCH)"
	$(PIP) --constraint infra/constraints.txt --editable ".[pipeline,dev]"
	@touch $(STAMP)

clean: ## Remove the environment and every run
	rm -rf $(VENV) runs
