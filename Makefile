# Everything needs only Python >= 3.11 and the internet; a second run is quick.
#   make demo    a mixed fleet on this machine, trained on, moved across, compared
#   make test    the tests that every change must pass: unit and contract tests, one real fleet; 8 to 20 minutes on 2 cores
#   make test-all  the slow tests that `make test` leaves out: lost heads, several machines, the demo, whole benchmarks;
#                15 to 40 minutes on 2 cores
#   make flaky   repeat the tests of a tier in random order under load, to find those that fail sometimes; N=20 TIER=gate,
#                TESTS="tests/cluster tests/test_runs.py" a part of them, FLAKY="-o FILE --at-once 3" adds the runs to FILE,
#                three of them at a time
#   make chaos   real faults, one after the other: killed processes, frozen ones, full disks, restarts; about 35 minutes,
#                CHAOS="-o FILE" keeps its figures, "-o FILE --resume" goes on; see docs/reliability.md
#   make simulate  the controller in virtual time under faults; SEED=0 EVENTS=10000000
#   make fuzz    a million mutated inputs for the readers of untrusted bytes, at low priority; FUZZ="--seconds 60"
#   make lint    formatting, lint and types, as in .ci/run and pre-commit
#   make docs    write the generated pages of docs/ anew
#   make clean   remove what was made in this folder; environments in the user's cache stay (polyfleet env remove)

.PHONY: help demo test test-all flaky chaos simulate fuzz lint docs clean environment second-environment
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo $$p; break; }; done)
LOCK := cluster/environments/locks/main.txt
BIN := .venv/bin
# The environment is made anew when the lock or the project's own metadata change.
STAMP := .venv/made-from-$(firstword $(shell cat $(LOCK) pyproject.toml | cksum))

# pip, with its progress in a few lines: which package of how many, the large downloads with their sizes.
PACKAGES := $(shell grep -c == $(LOCK))
TELLING := $(BIN)/python -m cluster.environments.pip_progress
INSTALL := $(BIN)/python -m pip install --disable-pip-version-check --progress-bar off --no-compile

# What a test run and the demo print, and how long they take, must not depend on the caller's shell: without bytecode
# files every command, server and rank of a fleet compiles all of our code anew.
unexport PYTHONPATH PYTHONHOME PYTHONDONTWRITEBYTECODE

help:
	@sed -n 's/^#   //p' Makefile

demo: environment second-environment
	$(BIN)/python examples/demo.py

# POLYFLEET_XLA_PYTHON is the interpreter of the second environment; tests that need it say so where it is not set.
# tests/conftest.py says how many files at a time, tests/schedule.py in which order, and what runs together.
PYTEST := $(BIN)/python -m pytest --numprocesses=auto --dist=loadscope --durations=10 --durations-min=1
N ?= 20
TIER ?= gate
TESTS ?=
test: RUNS := $(PYTEST) --tier=gate $(PYTEST_ARGUMENTS)
test-all: RUNS := $(PYTEST) --tier=full $(PYTEST_ARGUMENTS)
flaky: RUNS := $(BIN)/python tests/flaky_campaign.py --runs $(N) --tier $(TIER) $(FLAKY) $(TESTS)
chaos: RUNS := $(BIN)/python tests/chaos/campaign.py $(CHAOS)

test test-all flaky chaos: environment second-environment
	xla=$$($(BIN)/polyfleet env path xla 2>/dev/null); \
	export $${xla:+POLYFLEET_XLA_PYTHON="$$xla"}; \
	$(RUNS)

SEED ?= 0
EVENTS ?= 10000000
simulate: environment
	$(BIN)/python -m tests.simulator --seed $(SEED) --events $(EVENTS) --keep-going

fuzz: environment
	$(BIN)/python tests/attacks/fuzz_campaign.py $(FUZZ)

lint: environment
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/python docs/generate.py --check

docs: environment
	$(BIN)/python docs/generate.py

clean:
	rm -rf .venv build dist *.egg-info demo-report .pytest_cache .mypy_cache .ruff_cache .hypothesis .fuzz
	find . -path ./.git -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +

environment: $(STAMP)

$(STAMP):
	@test -n "$(PYTHON)" || { echo "Polyfleet needs Python 3.11 or newer; install it, or name it: make PYTHON=/path/to/python" >&2; exit 2; }
	@echo "making .venv with $(PACKAGES) packages from $(LOCK): minutes the first time, mostly for torch" >&2
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv || { echo "on Debian and Ubuntu: apt install python3-venv" >&2; exit 2; }
	@rm -f .venv/made-from-*
	@$(TELLING) $(PACKAGES) $(INSTALL) -r $(LOCK)
	@echo "installing what tests read, and Polyfleet itself" >&2
	@$(TELLING) 1 $(INSTALL) --no-deps -r tests/data/requirements.txt
	@$(TELLING) 1 $(INSTALL) --no-deps --no-build-isolation --editable .
	@echo "compiling to bytecode, on all cores" >&2
	@$(BIN)/python -m compileall -q -q -j 0 .venv/lib || true # pip would use one core; some files are for other Pythons
	@touch $@

# Exit code 3 means that this machine cannot hold it (system, Python, disk): said above, and not an error.
second-environment: environment
	@$(BIN)/polyfleet env create xla >/dev/null || { code=$$?; test $$code -eq 3 && echo "going on without the second environment"; }
