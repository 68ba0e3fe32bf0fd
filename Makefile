# One environment in .venv, from requirements.lock, with uv (fetched into .uv when the machine has none). Nothing global.
PYTHON ?= python3
UV := $(shell command -v uv 2>/dev/null || echo .uv/bin/uv)
BIN := .venv/bin
# Two at a time, each on one thread: the cores are shared by whole tests rather than by the threads of one.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal

.PHONY: setup lock peers demo test test-slow check bench bench-diagnose bench-diagnose-quick bench-gpu clean

setup: .venv/.ready

.uv/bin/uv:
	$(PYTHON) -m venv .uv
	.uv/bin/pip install --quiet --disable-pip-version-check 'uv>=0.5'

.venv/.ready: requirements.lock pyproject.toml $(filter .uv/bin/uv,$(UV))
	test -x $(BIN)/python || $(UV) venv --quiet --python $(PYTHON) .venv
	$(UV) pip sync --quiet --compile-bytecode --python $(BIN)/python --require-hashes requirements.lock
	$(UV) pip install --quiet --python $(BIN)/python --no-deps --no-build-isolation --editable .
	touch $@

lock: $(filter .uv/bin/uv,$(UV))  ## after a change of the dependencies
	$(UV) pip compile --quiet --universal --generate-hashes --no-header --group dev --extra onnx pyproject.toml -o requirements.lock

peers: $(filter .uv/bin/uv,$(UV))  ## what the benchmarks measure beside; 7 GB, in .peers
	test -x .peers/bin/python || $(UV) venv --quiet --python $(or $(wildcard $(BIN)/python),$(PYTHON)) .peers
	$(UV) pip sync --quiet --python .peers/bin/python --require-hashes benchmarks/peers.txt

demo: setup
	$(BIN)/stoker train demo

test: setup
	$(PYTEST) -m "not slow and not gpu"

test-slow: setup
	$(PYTEST) -m "slow and not gpu"

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy tests/api_usage.py
	$(BIN)/lint-imports

bench: setup  ## about 12 minutes; beside what `make peers` has installed, else n/a
	$(BIN)/python benchmarks/index.py --json benchmarks/results/index-cpu.json
	$(BIN)/python benchmarks/check.py --json benchmarks/results/check-cpu.json
	$(BIN)/python benchmarks/ledger.py --json benchmarks/results/ledger-cpu.json
	$(BIN)/python benchmarks/evaluate.py --json benchmarks/results/evaluate-cpu.json
	$(BIN)/python benchmarks/step.py --json benchmarks/results/step-cpu.json
	$(BIN)/python benchmarks/startup.py --json benchmarks/results/startup-cpu.json
	$(BIN)/python benchmarks/loader.py --json benchmarks/results/loader-cpu.json
	$(BIN)/python benchmarks/end_to_end.py --json benchmarks/results/end-to-end-cpu.json
	$(BIN)/python benchmarks/storage.py --json benchmarks/results/storage-cpu.json
	$(BIN)/python benchmarks/cache.py --json benchmarks/results/cache-cpu.json

# The seed of the levels: `make bench-diagnose SEED=7`; the same command again goes on where it was ended.
bench-diagnose: setup  ## 45 minutes, on a machine that does nothing else
	$(BIN)/python benchmarks/diagnose.py $(if $(SEED),--seed $(SEED)) --json benchmarks/results/diagnose-cpu.json

bench-diagnose-quick: setup  ## 5 minutes
	$(BIN)/python benchmarks/diagnose.py --quick $(if $(SEED),--seed $(SEED)) --json diagnose-quick.json

bench-gpu:  ## under 10 minutes; takes the machine's own Python where there is no .venv
	PYTHONPATH=. $(or $(wildcard $(BIN)/python),$(PYTHON)) benchmarks/gpu.py --json benchmarks/results/gpu.json

clean:
	rm -rf .venv .uv .peers
