# One command each. A target with a `##` text lists itself under `make help`.

SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

VENV := .venv
BIN := $(VENV)/bin
DEMO_OUT ?= demo-out

# The first interpreter that is new enough; `make setup PYTHON=/path/to/python` picks another.
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11 python3.14; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo $$p; break; }; done)

# An editable install knows the folder it was made in, so the stamp names the folder as well as the requirements.
STAMP := $(VENV)/.installed-$(shell { cat pyproject.toml; pwd; } | cksum | cut -d' ' -f1)

# llama.cpp is built from source: leave out the parts (vision) that kvtape never loads.
export CMAKE_ARGS ?= -DLLAVA_BUILD=OFF
export CMAKE_BUILD_PARALLEL_LEVEL ?= $(shell getconf _NPROCESSORS_ONLN 2>/dev/null || echo 2)
# Threads that spin while they wait slow every engine down on few cores; NumPy needs one thread here.
export OMP_WAIT_POLICY ?= passive
export OPENBLAS_NUM_THREADS ?= 1

# Processes of the test suite, each with its own engines; JOBS=0 is one, without workers.
JOBS ?= 2

STRICT := planner capacity traces backends eval replay serve sim report cli testing

.PHONY: help setup demo test check format docs site bench bench-peers fidelity contract soak clean

help: ## list the targets
	@awk -F':.*## ' '/^[a-z-]+:.*## / { printf "  make %-11s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(STAMP) ## make .venv and install kvtape with both engines and the demo model into it

$(STAMP): pyproject.toml
	@test -n "$(PYTHON)" || { echo "kvtape needs Python 3.11 or newer; name one with: make setup PYTHON=..." >&2; exit 3; }
	@command -v c++ >/dev/null || command -v g++ >/dev/null || command -v clang++ >/dev/null \
		|| { echo "llama.cpp is compiled during setup: install a C++ compiler (for example: apt-get install g++)" >&2; exit 3; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade 'pip>=25' 'setuptools>=77' wheel
	@echo "installing (the first time llama.cpp is compiled, some minutes)" >&2
	PYTHONWARNINGS=ignore $(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[demo,dev]'
	@rm -f $(VENV)/.installed-*
	@touch $@

demo: setup ## record a real session, replay it on both engines, simulate other policies (writes demo-out/)
	$(BIN)/kvtape demo --out $(DEMO_OUT)

test: setup ## the whole test suite
	$(BIN)/python -m pytest --numprocesses $(JOBS) --dist loadfile

check: setup ## formatting, lint, types, the floor rule
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy $(foreach room,$(STRICT),-p kvtape.$(room))
	$(BIN)/lint-imports

format: setup ## rewrite the sources in the project's format
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

contract: setup ## the parity contract: run its tests, then say what holds, in LOG too (kvtape doctor --contract)
	$(BIN)/python -m pytest -q -m contract --kvtape-evidence contract-evidence.json tests
	$(BIN)/kvtape doctor --contract $(LOG) --evidence contract-evidence.json

docs: setup ## write the generated parts of the pages
	$(BIN)/python docs/write_pages.py
	$(BIN)/python docs/write_pictures.py
	$(BIN)/python docs/write_contract.py
	$(BIN)/python docs/write_gate.py
	$(BIN)/python docs/write_http_api.py
	$(BIN)/python docs/write_certification.py
	$(BIN)/python docs/write_batching.py
	$(BIN)/python -m kvtape.traces.document docs/log-schema.md
	$(BIN)/python docs/write_sql.py
	$(BIN)/python docs/write_outputs.py

site: setup ## build the pages of docs/ as a site that needs no network (writes site/)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict
	@echo "site/index.html"

bench-peers: setup ## kvtape curve and fleet beside its peers from PyPI, on a Mooncake trace (TRACE=F.jsonl)
	@test -n "$(TRACE)" || { echo "name a Mooncake request trace: make bench-peers TRACE=conversation_trace.jsonl" >&2; exit 2; }
	$(BIN)/python benchmarks/peers/run.py "$(TRACE)"

bench: setup ## measure what the documents promise
	$(BIN)/python benchmarks/run.py

fidelity: setup ## record on both engines, predict, compare with this machine (some minutes; table on stdout)
	$(BIN)/python benchmarks/fidelity.py

soak: setup ## the long run of crashes: kills, power cuts, full disks, flipped bits, servers under load (an hour)
	$(BIN)/python benchmarks/soak.py
	$(BIN)/python benchmarks/soak_hosts.py
	$(BIN)/python benchmarks/soak_serve.py

clean: ## remove the environment and everything that was built
	rm -rf $(VENV) build dist site *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
