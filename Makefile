# Everything runs inside .venv/, which this file makes by itself: `make demo` and `make test` work on a fresh clone.
PYTHON ?= $(shell for p in python3.13 python3.12 python3.11 python3.14 python3; do \
	$$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 15))' 2>/dev/null && echo $$p && break; done)
UV := $(shell command -v uv 2>/dev/null || echo .uv/bin/uv)
BIN := .venv/bin
# The BLAS in MLX's Linux wheel is 26 times slower in fp32 than OpenBLAS, which tests use where it is installed.
BLAS := $(firstword $(wildcard /usr/lib/*/libopenblas.so.0 /usr/lib64/libopenblas.so.0))
FAST = $(if $(BLAS),LD_PRELOAD=$(BLAS)) OPENBLAS_NUM_THREADS=1
PYTEST = $(FAST) $(BIN)/python -m pytest
READY := .venv/.ready

.PHONY: demo test quick lint types models unit bench neuter fuzz docs screenshots clients manual lock clean mac-check

demo: $(READY)
	$(BIN)/python -m tests.support.demo

# A machine that is busy with something else can make a test of time fail that is sound. What fails is tried once more by
# itself, and named; what fails twice is wrong.
AGAIN = { [ $$? -eq 1 ] && echo "failed at first, once more by themselves:" && $(PYTEST) --last-failed --last-failed-no-failures none
test: $(READY) lint types models
	$(PYTEST) -n 2 --dist worksteal --durations 25 --durations-min 5 tests || $(AGAIN) tests; }

quick: $(READY) lint types unit

lint: $(READY)
	$(BIN)/ruff format --check --quiet .
	$(BIN)/ruff check --quiet .
	$(BIN)/lint-imports --no-cache > .venv/lint-imports.log || { cat .venv/lint-imports.log; exit 1; }

# Trained once and kept in .cache/: a test that had to train its model first would need minutes.
models: $(READY)
	$(BIN)/python -m tests.models

types: $(READY)
	$(BIN)/basedpyright --level error

unit: $(READY) models
	$(PYTEST) -n 2 -m "not hosts and not slow" tests

bench: $(READY)
	$(BIN)/python -m tests.bench

fuzz: $(READY)
	$(BIN)/python -m tests.fuzz

neuter: $(READY)
	$(FAST) $(BIN)/python -m tests.neuter

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

manual: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

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
