# Everything runs inside .venv/, which this file makes by itself: `make demo` and `make test` work on a fresh clone.
PYTHON ?= $(shell for p in python3.13 python3.12 python3.11 python3.14 python3; do \
	$$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 15))' 2>/dev/null && echo $$p && break; done)
UV := $(shell command -v uv 2>/dev/null || echo .uv/bin/uv)
BIN := .venv/bin
# The BLAS in MLX's Linux wheel is 26 times slower in fp32 than OpenBLAS, which tests use where it is installed.
BLAS := $(firstword $(wildcard /usr/lib/*/libopenblas.so.0 /usr/lib64/libopenblas.so.0))
# Tests create and delete thousands of small files, which on a disk takes a fifth of the CPU time of some folders.
MEMORY_FOLDER := $(shell test -w /dev/shm && df -Pk /dev/shm | awk 'NR == 2 && $$4 > 4000000 { print "/dev/shm" }')
FAST = $(if $(BLAS),LD_PRELOAD=$(BLAS)) $(if $(MEMORY_FOLDER),PYTEST_DEBUG_TEMPROOT=$(MEMORY_FOLDER)) OPENBLAS_NUM_THREADS=1
PYTEST = $(FAST) $(BIN)/python -m pytest
SUITE := $(FAST) $(BIN)/python -m tests.suite
READY := .venv/.ready
# A process that may not keep its bytecode compiles all that it imports: an engine then takes 2.2 s of CPU to start, not 1.1.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo test suite nightly other quick lint types changed-types rewritten rewritten-suite models unit bench neuter mutants coverage fuzz docs screenshots clients walks manual lock clean mac-check

demo: $(READY)
	$(BIN)/python -m tests.support.demo

# pytest rewrites the assertions of a new clone once, beside other checks, and not once in every worker. The check of the types
# uses one core for a minute, beside the rewriting and then beside tests that wait for processes.
test: $(READY)
	$(MAKE) -j 2 rewritten lint changed-types rewritten-suite
	$(FAST) $(BIN)/python -m tests.neuter --changed --seconds 120

# The suite as a scheduler may start it, with all drawn cases: no terminal, SIGINT ignored, both cores busy.
nightly: $(READY) lint types
	for core in 1 2; do timeout 5400 sh -c 'while :; do :; done' & busy="$$busy $$!"; done; \
	trap "kill $$busy" EXIT; trap '' INT; nohup env MACPOOL_NIGHTLY=1 $(SUITE) -n 2 --dist worksteal tests </dev/null

# Another Python than the one of .venv/, 3.11 to 3.14: unit and contract tests run with it, too.
OTHER ?= $(shell own=$$($(BIN)/python -c 'import sys; print(sys.version_info[1])'); \
	for p in python3.14 python3.13 $(wildcard $(HOME)/.pyenv/versions/3.1[34].*/bin/python3) python3.12 python3.11; do \
	$$p -c "import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 15) or sys.version_info[1] == $$own)" 2>/dev/null \
	&& echo $$p && break; done)
other: $(READY)
	@test -n "$(OTHER)" || { echo "no other Python was found: name one: make other OTHER=/path/to/python3.13" >&2; exit 1; }
	$(UV) venv --quiet --allow-existing --python $(OTHER) .venv/other
	$(UV) pip sync --quiet --python .venv/other/bin/python requirements/dev.txt
	$(UV) pip install --quiet --python .venv/other/bin/python --no-build-isolation --no-deps --editable .
	$(FAST) .venv/other/bin/python -m tests.suite -n 2 --dist worksteal -m "not hosts and not slow" tests/unit tests/contract

# More workers than cores: many tests wait for processes.
suite: $(READY)
	$(SUITE) -n 5 --dist worksteal --durations 25 --durations-min 5 tests

rewritten-suite: rewritten
	$(MAKE) suite

rewritten: $(READY)
	$(PYTEST) --collect-only -q tests > .venv/collected.log || { tail -n 50 .venv/collected.log; exit 1; }

# Checks of the differences from HEAD, or from another commit: make quick BASE=main.
quick: $(READY)
	$(FAST) $(BIN)/python -m tests.quick $(BASE)

lint: $(READY)
	$(BIN)/ruff format --check --quiet .
	$(BIN)/ruff check --quiet .
	$(BIN)/lint-imports --no-cache > .venv/lint-imports.log || { cat .venv/lint-imports.log; exit 1; }
	$(BIN)/python -m docs.style_check

# Train the tests' models anew, after what they learn or their shape has changed: tests/models/trained/ is committed.
models: $(READY)
	$(BIN)/python -m tests.models

types: $(READY)
	$(BIN)/basedpyright --level error

changed-types: $(READY)
	$(BIN)/python -m tests.quick --types

unit: $(READY)
	$(SUITE) -n 2 --dist worksteal -m "not hosts and not slow" tests

bench: $(READY)
	$(BIN)/python -m tests.bench

fuzz: $(READY)
	$(BIN)/python -m tests.fuzz

neuter: $(READY)
	$(FAST) $(BIN)/python -m tests.neuter

# Branches that unit, contract and simulation tests take, by room, against the floors in tests/coverage.toml.
coverage: $(READY)
	$(FAST) $(BIN)/python -m tests.coverage

mutants: $(READY)
	$(FAST) $(BIN)/python -m tests.neuter.mutants

mac-check: $(READY)
	$(BIN)/python -m deploy.mac_check

screenshots: $(READY)
	$(FAST) $(BIN)/python -m tests.browser.screenshots

docs: $(READY)
	$(BIN)/python -m docs.generate
	$(BIN)/python -m dashboards.generate

clients: $(READY)
	$(FAST) $(BIN)/python -m tests.clients.drive
	$(FAST) $(BIN)/python -m tests.clients.agent

walks: $(READY)
	$(FAST) $(BIN)/python -m pytest -q -v -s -p no:randomly tests/e2e/commands/test_walks.py

manual: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet
	@echo "the manual: .site/index.html"

lock: $(READY)
	UV=$(UV) sh requirements/compile.sh

clean:
	rm -rf .venv .uv

$(READY): requirements/dev.txt pyproject.toml
	@test -n "$(PYTHON)" || { echo "no Python 3.11 to 3.14 was found: install one, or name it: make PYTHON=…" >&2; exit 1; }
	@command -v $(UV) >/dev/null 2>&1 || $(PYTHON) -c 'import ensurepip' 2>/dev/null || { echo \
	"$(PYTHON) cannot make a virtual environment (on Debian: apt-get install python3-venv), and there is no uv" >&2; exit 1; }
	@command -v $(UV) >/dev/null 2>&1 || { rm -rf .uv && $(PYTHON) -m venv .uv && .uv/bin/python -m pip install --quiet uv; }
	$(UV) venv --quiet --allow-existing --python $(PYTHON) .venv
	$(UV) pip sync --quiet --python $(BIN)/python requirements/dev.txt
	$(UV) pip install --quiet --python $(BIN)/python --no-build-isolation --no-deps --editable .
	@touch $@
