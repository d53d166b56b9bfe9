# Each target does its own set-up in .venv; the machine brings Python >= 3.11, make and, for Spark, Java >= 17.
.DEFAULT_GOAL := help
.PHONY: help demo test test-full matrix simulate mutants crash year lint docs bench bench-smoke bench-growth release clean python java

VENV := .venv
BIN := $(VENV)/bin
N ?= 100
EVENTS ?= 20000
JOBS ?= 5
JAVA := $(if $(JAVA_HOME),$(JAVA_HOME)/bin/java,java)
NEW_ENOUGH := import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))
PYTHON ?= $(firstword $(foreach name,python3 python3.11 python3.12 python3.13,\
	$(shell $(name) -c '$(NEW_ENOUGH)' 2>/dev/null && echo $(name))))
# Without bytecode each of a run's hundreds of processes would compile what it imports.
unexport PYTHONDONTWRITEBYTECODE

help: ## Show this help
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: java $(VENV)/.jars ## Kill a stream in mid-run, count what arrived (DEMO_ARGS="--store postgresql://... --seed 7")
	@$(BIN)/dedup demo $(DEMO_ARGS)

test: java $(VENV)/.classes ## Run every promise once, and on each store what it does by itself, in JOBS=5 processes (PYTEST_ARGS="-k checkpoint -x")
	@$(BIN)/python -m pytest -n $(JOBS) --dist loadgroup --no-loadscope-reorder $(PYTEST_ARGS)

test-full: java $(VENV)/.classes ## Run all tests, hours of them, or parts of them (PART="brokers docs"; PART=list names them)
	@PYTHONPATH=.:tests $(BIN)/python -m kit.parts $(PART) --jobs $(JOBS) $(PARTS_ARGS)

matrix: java $(VENV)/.classes ## Run Spark's tests on each version of it (SPARK="3.5 4.0"; MATRIX_ARGS=--note writes the docs' table)
	@PYTHONPATH=.:tests $(BIN)/python -m kit.matrix $(SPARK) $(MATRIX_ARGS)

simulate: $(VENV)/.ready ## Play N schedules of crashes, instances and replays against the planning code (N=100000), or one of them (SEED=123)
	@PYTHONPATH=.:tests $(BIN)/python -m simulation $(if $(SEED),--seed $(SEED),$(N)) $(SIMULATE_ARGS)

mutants: $(VENV)/.ready ## Break the protocol on purpose in a copy: each break has to be noticed (a quarter of an hour)
	@PYTHONPATH=.:tests $(BIN)/python -m kit.mutants $(MUTANTS)

crash: $(VENV)/.ready ## Break processes, servers, connections and disks N times a store (N=1000), go on where it ended (CRASH_ARGS="--store delta")
	@PYTHONPATH=.:tests $(BIN)/python -m crash $(N) $(CRASH_ARGS)

year: $(VENV)/.ready ## Play a year of a consumer, with purges, deaths and each alarm's fault (YEAR_ARGS="--store postgres --batches 4")
	@PYTHONPATH=.:tests $(BIN)/python -m kit.year $(YEAR_ARGS)

lint: $(VENV)/.ready ## Check style, types, the direction of imports; look for secrets and known holes
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/basedpyright --project .ci/pyright.json --pythonpath $(BIN)/python --level error
	@$(BIN)/lint-imports
	@$(BIN)/python .ci/audit.py

docs: $(VENV)/.ready ## Build the documentation site in build/site; a broken link or anchor is an error
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

bench: java $(VENV)/.jars ## Measure side by side with the usual ways, write benchmarks/latest.json
	@$(BIN)/python -m benchmarks $(BENCH_ARGS)

bench-smoke: java $(VENV)/.jars ## Measure a little: has anything become much slower?
	@$(BIN)/python -m benchmarks.smoke

bench-growth: java $(VENV)/.jars ## Measure batches, starts, packed tables and purges beside 1 M to 100 M reservations (BENCH_ARGS="delta --reservations 1000000 10000000": batches), draw growth.svg
	@$(BIN)/python -m benchmarks.growth --keep $(BENCH_ARGS)
	$(if $(BENCH_ARGS),,@$(BIN)/python -m benchmarks.restart --keep)
	$(if $(BENCH_ARGS),,@$(BIN)/python -m benchmarks.packed --keep)
	$(if $(BENCH_ARGS),,@$(BIN)/python -m benchmarks.purges --keep)
	@$(BIN)/python -m benchmarks.plot

release: java $(VENV)/.ready ## Build sdist and wheel into dist/, check them, and run README's program and the demo from the wheel in empty environments (EVENTS=20000)
	@rm -rf build dist *.egg-info
	@$(BIN)/python -m build --quiet --no-isolation
	@$(BIN)/python -m twine check --strict dist/*
	@empty=$$(mktemp -d) && trap 'rm -rf "$$empty"' EXIT && wheel=$$(ls "$(CURDIR)"/dist/*.whl) && \
	sed -n '/^```python$$/,/^```$$/{/^```/d;p}' README.md | sed "s,/tmp/shop,$$empty/shop,g" > "$$empty/job.py" && \
	$(BIN)/python -m venv "$$empty/venv" && cd "$$empty" && unset PYTHONPATH && \
	venv/bin/python -m pip install --quiet --disable-pip-version-check "$$wheel[spark,delta]" && \
	PATH="$$empty/venv/bin:$$PATH" python job.py && venv/bin/dedup verify --store "$$empty/shop/dedup" && \
	venv/bin/python -m pip install --quiet --disable-pip-version-check "$$wheel[demo]" && \
	venv/bin/dedup --version && venv/bin/dedup demo --events $(EVENTS)

clean: ## Remove .venv and everything that the other targets made
	rm -rf $(VENV) build dist *.egg-info .demo .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	rm -rf spark-warehouse metastore_db derby.log
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/.ready: setup.cfg pyproject.toml constraints.txt | python
	@echo "Setting up $(VENV) (once; Spark alone is 400 MB to download) ..."
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt setuptools
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --no-build-isolation --editable '.[dev]'
	@touch $@

python:
	@test -n "$(PYTHON)" && $(PYTHON) -c '$(NEW_ENOUGH)' 2>/dev/null || { echo >&2 "Python 3.11 or newer, with its venv module,\
	 is needed and was not found: install it, or name it with make PYTHON=/path/to/python3.11."; exit 1; }

java:
	@version=$$("$(JAVA)" -version 2>&1 | sed -n 's/.*version "\([0-9]*\).*/\1/p' | head -n 1); \
	if test -z "$$version"; then \
		echo >&2 "Spark needs Java 17 or newer and $(JAVA) does not run: install it, or point JAVA_HOME to it."; exit 1; \
	elif test "$$version" -lt 17; then \
		echo >&2 "Spark needs Java 17 or newer and $(JAVA) is older: install one, or point JAVA_HOME to it."; exit 1; \
	fi

# Spark resolves them by itself at any start; here nobody waits in mid-demo for a download.
$(VENV)/.jars: dedup/spark/session.py $(VENV)/.ready | java
	@echo "Starting Spark once (the first time it fetches the jars of Delta) ..."
	@$(BIN)/python -m dedup.spark.session >$(VENV)/jars.log 2>&1 || { cat $(VENV)/jars.log >&2; exit 1; }
	@touch $@

# Each start of Spark then takes a third less; tests start it several times.
$(VENV)/.classes: tests/kit/class_archive.py $(VENV)/.jars
	@PYTHONPATH=.:tests $(BIN)/python -m kit.class_archive >$(VENV)/classes.log 2>&1 || { cat $(VENV)/classes.log >&2; exit 1; }
	@touch $@
