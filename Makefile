# 'make demo' and 'make test' set everything up themselves, in .venv, and use it again while it is current.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
TYPES := build/types
READY := $(VENV)/.ready

.PHONY: demo test check types format schema docs clean

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --constraint constraints.txt --editable ".[test,check]"
	touch $@

demo: $(READY)
	$(BIN)/slipcast demo --overwrite

test: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto  # a thread for each worker: more only wait for one another

# Style, types, generated files that must be current, and a proof of every family file.
check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(MAKE) types
	$(BIN)/python -m slipcast.registry.json_schema --check
	$(BIN)/python -m slipcast.registry.catalogue_index --check
	$(BIN)/python -m slipcast.cli.docs_tables --check
	$(BIN)/slipcast check --all

# Type checkers don't follow setuptools' mapping of folders to packages, so they get a tree of links that is laid out like it.
types: $(READY)
	rm -rf $(TYPES) && mkdir -p $(TYPES)/slipcast
	ln -s $(CURDIR)/slipcast/* $(addprefix $(CURDIR)/,registry engine families configs) $(TYPES)/slipcast/
	cd $(TYPES) && $(CURDIR)/$(BIN)/mypy --config-file $(CURDIR)/pyproject.toml -p slipcast

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

schema: $(READY)
	$(BIN)/python -m slipcast.registry.json_schema
	$(BIN)/python -m slipcast.registry.catalogue_index

docs: $(READY)
	$(BIN)/python -m slipcast.cli.docs_tables

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
