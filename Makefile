# make demo   set up, then train six small language models on real text and compare them (eight minutes in all, on a laptop)
# make test   set up, then run the tests
# make mutations, make check: every shipped bug must be caught; lint, format and types

SHELL := /bin/bash
VENV ?= .venv
PYTHON ?= $(firstword $(foreach p,python3 python3.14 python3.13 python3.12 python3.11,$(shell \
	command -v $(p) >/dev/null && $(p) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $(p))))
BIN := $(VENV)/bin

.PHONY: demo test mutations check clean
demo: $(VENV)/.core
	@$(BIN)/tandem compare demo --processes 2 # of one thread each where there are two cores

test: $(VENV)/.test
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal

mutations: $(VENV)/.test
	@OMP_NUM_THREADS=1 $(BIN)/python -m tandem.testing.mutations

check: $(VENV)/.test
	@$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/pyrefly check --python-interpreter-path $(BIN)/python

clean:
	rm -rf $(VENV)

# The constraints file pins every version; torch's size depends on the package index: with CUDA by default on Linux.
# PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu gives the small build. Byte code is written by what imports
# it: pip would compile 18,000 modules, of which all tests together import a third.
unexport PYTHONDONTWRITEBYTECODE
$(VENV)/.core: EXTRAS := plots,statistics,sentences
$(VENV)/.test: EXTRAS := plots,statistics,sentences,text,hub,tensorboard,wandb,harness,export,test
INSTALL = $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt \
	-e '.[$(EXTRAS)]' && touch $@

$(VENV)/.made:
	@test -n "$(PYTHON)" || { echo "make: needs Python 3.11 or newer (set PYTHON=/path/to/python)" >&2; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' || { echo "make: needs Python's venv module (Debian: python3-venv)" >&2; exit 1; }
	@echo "setting up $(VENV): a few minutes, once"
	@$(PYTHON) -m venv $(VENV) && touch $@
	-@$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade pip # installs in 71 s where 23.2 takes 102

$(VENV)/.core $(VENV)/.test: pyproject.toml constraints.txt | $(VENV)/.made
	@$(INSTALL)
