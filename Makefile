# One environment in .venv, from requirements.lock, with uv (fetched into .uv when the machine has none). Nothing global.
PYTHON ?= python3
UV := $(shell command -v uv 2>/dev/null || echo .uv/bin/uv)
BIN := .venv/bin
PACKAGES := packages/stoker-watch packages/stoker
SOURCES := .:packages/stoker-watch:packages/stoker
# Two processes with one thread each: tests share the cores, not the threads of one test.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal

# The ends of what is supported: a Python of pyenv, else one on the PATH, and what depends on the version of torch.
PYENV := $(or $(PYENV_ROOT),$(HOME)/.pyenv)/versions
WHEEL_PYTHONS := 3.10 3.13
python_version = $(or $(lastword $(sort $(wildcard $(PYENV)/$(1).*/bin/python))),python$(1))
VERSION_TESTS := $(addprefix tests/trainer/,models training hardware data/test_augment_device.py data/test_device_batches.py)

.PHONY: setup lock peers demo docs test test-watch test-wheel test-slow test-long test-oldest test-newest test-xla chaos soak check
.PHONY: bench bench-diagnose bench-diagnose-quick bench-gpu gpu-goal gpu-kit clean

setup: .venv/.ready

.uv/bin/uv:  # in a new folder: a setup that is interrupted leaves no part of one
	rm -rf .uv .uv.new
	$(PYTHON) -m venv .uv.new
	.uv.new/bin/pip install --quiet --disable-pip-version-check 'uv>=0.5'
	mv .uv.new .uv

.venv/.ready: requirements.lock $(PACKAGES:=/pyproject.toml) $(filter .uv/bin/uv,$(UV))
	$(BIN)/python -c 'import sys; sys.exit(sys.prefix == sys.base_prefix)' 2>/dev/null || \
		{ rm -rf .venv; $(UV) venv --quiet --python $(PYTHON) .venv; }
	$(UV) pip sync --quiet --compile-bytecode --python $(BIN)/python --require-hashes requirements.lock
	$(UV) pip install --quiet --python $(BIN)/python --no-deps --no-build-isolation $(PACKAGES:%=--editable %)
	touch $@

lock: $(filter .uv/bin/uv,$(UV))  ## after a change of the dependencies
	$(UV) pip compile --quiet --universal --generate-hashes --no-header --group dev --extra onnx --extra search \
		--no-emit-package stoker-watch $(PACKAGES:=/pyproject.toml) -o requirements.lock

peers: $(filter .uv/bin/uv,$(UV))  ## the peers of the benchmarks; 7 GB, in .peers
	test -x .peers/bin/python || $(UV) venv --quiet --python $(or $(wildcard $(BIN)/python),$(PYTHON)) .peers
	$(UV) pip sync --quiet --python .peers/bin/python --require-hashes benchmarks/peers.txt

demo: setup
	$(BIN)/stoker train demo

test: setup
	$(PYTEST) -m "not slow and not gpu"

test-watch: setup  ## those of stoker-watch
	$(PYTEST) -m "not slow and not gpu" tests/watch

test-slow: setup
	$(PYTEST) --durations=40 --durations-min=15 -m "slow and not long and not gpu"

test-long: setup  ## tests/long.txt: what CI leaves out; before a release
	STOKER_RANDOM_EXAMPLES=1 $(PYTEST) --durations=40 --durations-min=15 -m "long and not gpu"

test-wheel: $(WHEEL_PYTHONS:%=.venv-wheel-%/.ready)  ## those of stoker-watch, without torch and NumPy: its wheel
	$(foreach version,$(WHEEL_PYTHONS),.venv-wheel-$(version)/bin/python -c "$(ONLY_THE_WHEEL)" && \
		OMP_NUM_THREADS=1 .venv-wheel-$(version)/bin/python -m pytest -o pythonpath=. -n 2 --dist worksteal -rs \
		-m "not slow and not gpu" tests/watch &&) true

ONLY_THE_WHEEL := from importlib.util import find_spec; \
	assert 'site-packages' in find_spec('stoker_watch').origin; \
	assert not any(map(find_spec, ('stoker', 'torch', 'torchvision', 'numpy', 'cv2', 'pyarrow', 'PIL', 'plotly')))

# What the build writes there is no source of it.
build/wheel/.ready: $(filter .uv/bin/uv,$(UV)) $(shell find packages/stoker-watch -type f -not -path '*/__pycache__/*' \
		-not -name plotly.min.js -not -name LICENSE.plotly)
	rm -rf build/wheel && $(UV) build --quiet --wheel --out-dir build/wheel packages/stoker-watch
	touch $@

# The packages of the tests are those of the lock, but for Python 3.10, of which it knows nothing.
.venv-wheel-%/.ready: build/wheel/.ready
	$(UV) venv --quiet --clear --python $(call python_version,$*) .venv-wheel-$*
	$(UV) pip install --quiet --python .venv-wheel-$*/bin/python build/wheel/*.whl \
		pytest pytest-timeout pytest-xdist hypothesis 'moto[server]' $(if $(filter 3.10,$*),,--constraint requirements.lock)
	touch $@

test-oldest: .venv-oldest/.ready  ## Python 3.11, torch 2.11; 3 GB, in .venv-oldest
	OMP_NUM_THREADS=1 .venv-oldest/bin/python -m pytest -n 2 --dist worksteal -m "not slow and not gpu" $(VERSION_TESTS)

test-newest: .venv-newest/.ready  ## Python 3.13, the newest torch; 6 GB, in .venv-newest
	OMP_NUM_THREADS=1 .venv-newest/bin/python -m pytest -n 2 --dist worksteal -m "not slow and not gpu" $(VERSION_TESTS)

.venv-oldest/.ready: $(PACKAGES:=/pyproject.toml) $(filter .uv/bin/uv,$(UV))
	$(UV) venv --quiet --clear --python $(call python_version,3.11) .venv-oldest
	$(UV) pip install --quiet --python .venv-oldest/bin/python --group dev $(PACKAGES:%=--editable %) 'torch==2.11.*' 'torchvision==0.26.*'
	touch $@

.venv-newest/.ready: $(PACKAGES:=/pyproject.toml) $(filter .uv/bin/uv,$(UV))
	$(UV) venv --quiet --clear --python $(call python_version,3.13) .venv-newest
	$(UV) pip install --quiet --python .venv-newest/bin/python --group dev $(PACKAGES:%=--editable %)
	touch $@

test-xla: .venv-xla/.ready  ## steps through XLA's CPU client: Python 3.11, torch 2.9 with torch_xla 2.9; 7 GB, in .venv-xla
	OMP_NUM_THREADS=1 PJRT_DEVICE=CPU XLA_FLAGS="--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true" \
		.venv-xla/bin/python -m pytest -p no:xdist tests/xla

.venv-xla/.ready: $(PACKAGES:=/pyproject.toml) tests/xla/requirements.txt $(filter .uv/bin/uv,$(UV))
	$(UV) venv --quiet --clear --python $(call python_version,3.11) .venv-xla
	$(UV) pip install --quiet --python .venv-xla/bin/python --overrides tests/xla/requirements.txt $(PACKAGES:%=--editable %) \
		'torch_xla==2.9.*' 'pytest>=8.3' 'pytest-timeout>=2.3' 'hypothesis>=6.115'
	touch $@

chaos: setup  ## the table of docs/faults.md, with times; 12 minutes on free cores
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -p no:xdist --durations=0 -m slow tests/chaos

soak: setup  ## 20 minutes of random faults; MINUTES=5 is shorter
	$(BIN)/python -m tests.chaos.soak --minutes $(or $(MINUTES),20)

docs: setup  ## docs/causes.md, all findings of all commands with thresholds, sources and fixes; docs/gpu-status.md
	$(BIN)/python scripts/write_causes.py > docs/causes.md
	$(BIN)/python scripts/write_gpu_status.py > docs/gpu-status.md

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy tests/api_usage.py
	$(BIN)/lint-imports
	$(BIN)/python scripts/check_cycles.py
	$(BIN)/python scripts/check_size.py
	$(BIN)/python scripts/stale_results.py

bench: setup  ## about 45 minutes; peers that `make peers` has installed, else n/a
	$(BIN)/python -m benchmarks all

# SEED=7 draws other levels; the same command again continues where it was stopped.
bench-diagnose: setup  ## 45 minutes, on an idle machine
	$(BIN)/python -m benchmarks diagnose $(if $(SEED),--seed $(SEED)) --json benchmarks/results/diagnose-cpu.json

bench-diagnose-quick: setup  ## 5 minutes
	$(BIN)/python -m benchmarks diagnose --quick $(if $(SEED),--seed $(SEED)) --json diagnose-quick.json

bench-diagnose-wild: setup  ## 50 minutes, on an idle machine; TensorFlow from `make peers`, Ultralytics see benchmarks/diagnosis/wild/job.py
	$(BIN)/python -m benchmarks diagnose_wild --json benchmarks/results/diagnose-wild-cpu.json

bench-gpu:  ## about an hour; uses the system Python where there is no .venv
	PYTHONPATH=$(SOURCES) $(or $(wildcard $(BIN)/python),$(PYTHON)) -m benchmarks gpu --json benchmarks/results/gpu-all.json
	PYTHONPATH=$(SOURCES) $(or $(wildcard $(BIN)/python),$(PYTHON)) -m benchmarks loader --runs 3 --json benchmarks/results/loader-gpu.json
	PYTHONPATH=$(SOURCES) $(or $(wildcard $(BIN)/python),$(PYTHON)) -m benchmarks nvjpeg --json benchmarks/results/nvjpeg-gpu.json
	PYTHONPATH=$(SOURCES) $(or $(wildcard $(BIN)/python),$(PYTHON)) -m benchmarks plan --gpu --json benchmarks/results/plan-gpu.json

gpu-goal:  ## what was measured on a GPU, next to goals and predictions
	PYTHONPATH=$(SOURCES) $(or $(wildcard $(BIN)/python),$(PYTHON)) -m benchmarks gpu --goal

gpu-kit:  ## .kit/: wheels, data and a script for a GPU machine without network (docs/benchmarks.md)
	PYTHON=$(PYTHON) bash scripts/gpu-kit.sh

clean:
	rm -rf .venv build .venv-wheel-* .venv-oldest .venv-newest .venv-xla .uv .peers .kit
