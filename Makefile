# Quire. `make run` and `make test` each work alone on a fresh machine (Python 3.11 or later; a C++20 compiler for the
# fast kernels).
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
CXX ?= c++
export CXX
# Each of the many processes that tests start would compile every module again.
unexport PYTHONDONTWRITEBYTECODE
# What pip shall install as torch, in pip's words: a requirement, a file, options. Empty: a CPU build, unless there is a
# GPU.
TORCH ?=
# The name says whether the kernels were compiled, so that a compiler installed later is noticed.
STAMP := $(VENV)/.installed-$(if $(shell command -v $(CXX)),with,without)-kernels
SOURCES := pyproject.toml CMakeLists.txt $(shell find csrc -name '*.cpp' -o -name '*.h')
MODEL ?=
ARGS ?=

.PHONY: run setup test test-full test-sanitize test-avx-vnni test-arm check format stub dashboards wheel docs release bench bench-gpu test-gpu clean

run: setup  ## server on the bundled demo model (or MODEL=...), with the playground at /
	$(BIN)/quire serve $(MODEL) $(ARGS)

setup: $(STAMP)  ## virtual environment, what running needs, compiled kernels

$(STAMP): $(SOURCES)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python tools/install.py --torch "$(TORCH)"
	touch $(STAMP)

# What an extra lists is installed once, and again when pyproject.toml changes.
$(VENV)/.installed-%: pyproject.toml $(STAMP)
	$(BIN)/python tools/install.py --extra $*
	touch $@

# Tests share the cores: some wait for processes, others compute, so two cores are busy with three. Each process has
# neighbouring tests, which share servers and models, and one that has done its own takes over some of another's. The
# first one has those that mostly wait (tests/conftest.py).
TEST_PROCESSES ?= 3
PYTEST := $(BIN)/python -m pytest -q -n $(TEST_PROCESSES) --dist worksteal

# Tests allocate and free the same megabytes again and again. The heap of glibc keeps them, so pages are not cleared
# anew.
HEAP := MALLOC_MMAP_THRESHOLD_=33554432 MALLOC_TRIM_THRESHOLD_=1073741824 MALLOC_TOP_PAD_=16777216

test: $(VENV)/.installed-test  ## what CI runs
	$(HEAP) $(PYTEST) -m "not slow" $(ARGS)

NODE_PACKAGES := tests/clients/ai_sdk/node_modules tests/e2e/azure_store/node_modules

$(NODE_PACKAGES): %/node_modules: %/package.json
	npm install --silent --no-audit --no-fund --no-package-lock --prefix $*
	touch $@

# A client that needs an older openai than the others has an environment of its own.
LLAMA_INDEX := build/llama_index/.installed

$(LLAMA_INDEX):
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/pip install --quiet llama-index-llms-openai-like
	touch $@

test-full: $(LLAMA_INDEX) $(VENV)/.installed-test $(VENV)/.installed-clients $(VENV)/.installed-charts $(VENV)/.installed-store-server $(VENV)/.installed-collector $(VENV)/.installed-docs $(VENV)/.installed-wheel $(VENV)/.installed-ray $(if $(shell command -v npm),$(NODE_PACKAGES))  ## also the slow suites, and other people's clients
	TEST_FULL=1 $(PYTEST) $(ARGS)

SANITIZED := build/sanitize

test-sanitize: $(VENV)/.installed-dev  ## the tests of what is compiled with AddressSanitizer and UndefinedBehaviorSanitizer in the extension (g++)
	$(BIN)/cmake -S . -B $(SANITIZED) -G Ninja -DCMAKE_CXX_COMPILER=g++ -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN)/ninja) \
		-DPython_EXECUTABLE=$(abspath $(BIN)/python) -DQUIRE_SANITIZE=ON
	$(BIN)/cmake --build $(SANITIZED)
	LD_PRELOAD="$$(g++ -print-file-name=libasan.so) $$(g++ -print-file-name=libstdc++.so)" ASAN_OPTIONS=detect_leaks=0 \
		QUIRE_SANITIZED=1 QUIRE_OTHER_EXTENSION=$(SANITIZED) $(BIN)/python -m pytest -q -p tests.other_extension tests/kernels \
		tests/distributed tests/spec_decode tests/cost/test_running_steps.py --ignore=tests/kernels/triton $(ARGS)

EVEX_VNNI := build/evex_vnni

test-avx-vnni: $(VENV)/.installed-dev  ## the products of the step avx_vnni on a CPU with AVX-512 VNNI, where only the encoding differs
	$(BIN)/cmake -S . -B $(EVEX_VNNI) -G Ninja -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN)/ninja) \
		-DPython_EXECUTABLE=$(abspath $(BIN)/python) -DQUIRE_EVEX_VNNI=ON
	$(BIN)/cmake --build $(EVEX_VNNI)
	QUIRE_OTHER_EXTENSION=$(EVEX_VNNI) $(BIN)/python -m pytest -q -p tests.other_extension tests/kernels/test_grouped.py \
		-k "avx_vnni or every_instruction_set" $(ARGS)

test-arm: $(VENV)/.installed-dev  ## the kernels for ARM64 in an emulator (Debian: g++-aarch64-linux-gnu, qemu-user; the first run downloads 250 MB)
	$(BIN)/python tools/test_arm.py $(ARGS)

check: $(VENV)/.installed-dev  ## format, lint, types, architecture
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/clang-format --dry-run --Werror $$(find csrc -name '*.cpp' -o -name '*.h')

format: $(VENV)/.installed-dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .
	$(BIN)/clang-format -i $$(find csrc -name '*.cpp' -o -name '*.h')

stub: $(VENV)/.installed-dev  ## what mypy knows of the extension, from the extension
	$(BIN)/python -m nanobind.stubgen -q -D -m quire._C -o src/quire/_C.pyi

dashboards: setup  ## Grafana's dashboard, Prometheus' rules and their pages, from the metric registry
	$(BIN)/python -m quire.metrics.dashboards deploy
	$(BIN)/python -m quire.metrics.document > docs/metrics.md
	$(BIN)/python -m quire.metrics.rules > docs/alerts.md

wheel: $(VENV)/.installed-wheel  ## a wheel with compiled kernels for this Python, in dist/ (Linux: manylinux_2_28)
	$(BIN)/python tools/wheel.py

docs: $(VENV)/.installed-docs  ## the documentation as a site, in build/site; reading it needs no network
	$(BIN)/mkdocs build --quiet

release:  ## refuses what cannot be released, runs everything, and builds what is released
	$(PYTHON) tools/release.py

FRONT_END_BENCHMARKS := $(addprefix benchmarks/,detokenizer.py frontend_capacity.py scheduler.py)

bench: $(VENV)/.installed-dev  ## microbenchmarks of the kernels and the front end, against the limits of this machine
	for file in benchmarks/kernels/*.py $(FRONT_END_BENCHMARKS); do echo "== $$file"; $(BIN)/python $$file || exit 1; done

# GPU_PYTHON=python3: with that interpreter's own torch and Triton, and nothing is installed. It needs msgspec, jinja2,
# tokenizers and tqdm beside them, and pytest, hypothesis and safetensors for the tests.
GPU_PYTHON ?=
GPU_SETUP := $(if $(GPU_PYTHON),,$(VENV)/.installed-test)
RUN_ON_GPU := PYTHONPATH=src $(or $(GPU_PYTHON),$(BIN)/python)

bench-gpu: $(GPU_SETUP)  ## kernels and engine against the limits of this machine's GPU, and against transformers
	$(RUN_ON_GPU) benchmarks/gpu/machine.py
	$(RUN_ON_GPU) benchmarks/gpu/kernels.py $(ARGS)
	$(RUN_ON_GPU) benchmarks/gpu/engine.py $(ARGS)
	$(RUN_ON_GPU) benchmarks/gpu/against_transformers.py $(ARGS)

test-gpu: $(GPU_SETUP)  ## what only a machine with an NVIDIA GPU can show
	$(RUN_ON_GPU) -m pytest -q -c tests/gpu.ini --rootdir . tests/kernels/triton tests/layers tests/engine/test_on_a_gpu.py $(ARGS)

clean:
	rm -rf $(VENV) build
