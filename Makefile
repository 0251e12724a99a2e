# `make rehearsal` runs the real trainer on this machine's CPU, profiled; docs/rehearsal.md.

PYTHON ?= python3
VENV ?= .venv
ENGINE ?= sglang
# Handed to pip, for example to name an index that has CPU builds of torch.
PIP_FLAGS ?=
# Handed to `verl-profiler rehearse`, for example --steps 5.
REHEARSE_FLAGS ?=

REQUIREMENTS := verl_profiler/rehearsal/requirements-$(ENGINE)
# A change of a list, or of what the package itself needs, installs again.
INSTALLED := $(VENV)/installed-$(ENGINE)

.PHONY: help install rehearsal

help:
	@echo "make rehearsal                  install into $(VENV) and rehearse with the real SGLang"
	@echo "make rehearsal ENGINE=standin   the same with a stand-in for the engine: smaller, quicker"
	@echo "make install                    install only"

install: $(INSTALLED)

rehearsal: $(INSTALLED)
	$(VENV)/bin/verl-profiler rehearse --engine $(ENGINE) $(REHEARSE_FLAGS)

# Plain pip: it finds the CPU builds of torch that uv does not.
$(INSTALLED): pyproject.toml $(wildcard verl_profiler/rehearsal/requirements-*.txt)
	test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	$(VENV)/bin/pip install $(PIP_FLAGS) -r $(REQUIREMENTS).txt
	$(VENV)/bin/pip install $(PIP_FLAGS) --no-deps -r $(REQUIREMENTS)-no-deps.txt
	$(VENV)/bin/pip install $(PIP_FLAGS) -e '.[report]'
	touch $@
