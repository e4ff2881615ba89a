# npufleet: `make help` lists what there is.
SHELL := /bin/bash
VENV ?= .venv
BIN := $(VENV)/bin
# Two processes, each taking whole files: engines that a file's tests share are started once. One thread each: threads
# that wait for each other beside as many of the other process take longer than one alone.
TEST_PROCESSES ?= 2
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(TEST_PROCESSES) --dist loadfile --no-loadscope-reorder
PORT ?= 8000
DURATION ?= 600

.DEFAULT_GOAL := help
.PHONY: help setup demo demo-check test test-all lint format protos parity bench-engine bench-router bench-faults bench-plugin bench-placement bench-routing contract seeded-faults chaos cluster-demo clean

help: ## Show this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | awk -F'\t' '{printf "  make %-14s %s\n", $$1, $$2}'

setup: ## Install everything into .venv (a second run takes seconds)
	@VENV=$(VENV) scripts/setup.sh

demo: setup ## Serve a real chat model on virtual NPUs behind router and gateway, ask it a question, keep serving
	$(BIN)/npufleet serve demo --port $(PORT)

demo-check: setup ## The same unattended: exit 0 after a right answer and a clean stop
	$(BIN)/npufleet serve demo --port $(PORT) --once

test: setup ## Run the test suite
	$(PYTEST) -m "not slow"

test-all: setup ## Run the test suite with the slow tests
	$(PYTEST)

lint: setup ## Run the linter, the format check and the type checker
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

protos: setup ## Generate the Python code of our own .proto files
	PYTHON=$(BIN)/python scripts/protos.sh

format: setup ## Format the code
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

parity: setup ## Every model family against transformers; writes docs/parity.md
	$(BIN)/python -m benchmarks.parity

bench-engine: setup ## Engine on a virtual NPU against vLLM's CPU backend; whole path against the engine; host overhead
	$(BIN)/python benchmarks/engine.py

bench-router: setup ## The router and gateway beside other routers over the same mock engines: CPU per token, added latency
	$(BIN)/python -m benchmarks.router

bench-faults: setup ## What clients of the router notice of an engine that dies, freezes, slows down or is cut off
	$(BIN)/python -m benchmarks.router.faults

bench-routing: setup ## Routing policies on simulated engines over a trace (TRACE=file.jsonl); writes docs/routing-benchmark.md
	@test -n "$(TRACE)" || { echo "give a trace with hash_ids: make bench-routing TRACE=conversation_trace.jsonl"; exit 2; }
	$(BIN)/python -m benchmarks.routing "$(TRACE)" --write docs

seeded-faults: setup ## Put faults into plugin and kernels, one at a time, and count those that the tests catch
	$(BIN)/python benchmarks/seeded_faults --write docs/seeded-faults.md

bench-plugin: setup ## Device operations per layer and step against plain layers, host overhead, bytes of collectives
	$(BIN)/python -m benchmarks.plugin

bench-placement: setup ## Placement against the optimum and Ray's PACK, and its time; writes docs/placement-benchmark.md
	@$(BIN)/python -c 'import ortools' 2>/dev/null || $(BIN)/pip install -q -e '.[benchmarks]'
	$(BIN)/python -m benchmarks.placement --write

contract: setup ## Hold every torch_npu call and full-size models' shapes and memory against their references; writes docs/contract.md
	$(BIN)/python benchmarks/contract.py

chaos: setup ## Kill parts of a fleet at random under steady load for DURATION seconds; writes the table into docs/operations.md
	$(BIN)/python -m benchmarks.chaos --seconds $(DURATION) --write docs/operations.md

cluster-demo: setup ## Two models on three simulated hosts: placed by the rules, shown, one host emptied
	$(BIN)/python -m benchmarks.cluster_demo

clean: ## Remove the environment and build products
	rm -rf $(VENV) *.egg-info .pytest_cache .ruff_cache .mypy_cache
