# Quire. `make run` and `make test` each work alone on a fresh machine (Python 3.11 or later; a C++20 compiler for the fast kernels).
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
CXX ?= c++
# The name says whether the kernels were compiled, so that a compiler installed later is noticed.
STAMP := $(VENV)/.installed-$(if $(shell command -v $(CXX)),with,without)-kernels
SOURCES := pyproject.toml CMakeLists.txt $(shell find csrc -name '*.cpp' -o -name '*.h')
MODEL ?=
ARGS ?=

.PHONY: run setup test test-full test-sanitize check format bench bench-gpu test-gpu clean

run: setup  ## server on the bundled demo model (or MODEL=...), with the playground at /
	$(BIN)/quire serve $(MODEL) $(ARGS)

setup: $(STAMP)  ## virtual environment, dependencies, compiled kernels

$(STAMP): $(SOURCES)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet "torch==2.13.0"
	@if command -v $(CXX) >/dev/null 2>&1; then \
		echo "Compiling the CPU kernels ..."; \
		$(BIN)/python -m pip install --quiet --editable ".[dev]"; \
	else \
		echo "No C++ compiler found ($(CXX)): installing without the compiled kernels; everything runs on plain torch, several times slower."; \
		echo "Install g++ 12 or clang 15 and run 'make setup' again for full speed."; \
		QUIRE_BUILD_KERNELS=0 $(BIN)/python -m pip install --quiet --editable ".[dev]"; \
	fi
	touch $(STAMP)

test: setup  ## what CI runs: about 7 minutes on 2 cores
	$(BIN)/python -m pytest -q -m "not slow" $(ARGS)

test-full: setup  ## also the slow suites
	$(BIN)/python -m pytest -q $(ARGS)

SANITIZED := build/sanitize

test-sanitize: setup  ## the kernels' tests with AddressSanitizer and UndefinedBehaviorSanitizer in the extension (g++)
	$(BIN)/cmake -S . -B $(SANITIZED) -G Ninja -DCMAKE_CXX_COMPILER=g++ -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN)/ninja) \
		-DPython_EXECUTABLE=$(abspath $(BIN)/python) -DQUIRE_SANITIZE=ON
	$(BIN)/cmake --build $(SANITIZED)
	LD_PRELOAD="$$(g++ -print-file-name=libasan.so) $$(g++ -print-file-name=libstdc++.so)" ASAN_OPTIONS=detect_leaks=0 \
		QUIRE_SANITIZED_EXTENSION=$(SANITIZED) $(BIN)/python -m pytest -q -p tests.sanitized_extension tests/kernels \
		--ignore=tests/kernels/triton $(ARGS)

check: setup  ## format, lint, types, architecture
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/clang-format --dry-run --Werror $$(find csrc -name '*.cpp' -o -name '*.h')

format: setup
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .
	$(BIN)/clang-format -i $$(find csrc -name '*.cpp' -o -name '*.h')

bench: setup  ## microbenchmarks of the kernels and the front end, against the limits of this machine
	for file in benchmarks/kernels/*.py benchmarks/*.py; do echo "== $$file"; $(BIN)/python $$file || exit 1; done

# GPU_PYTHON=python3: with that interpreter's own torch and Triton, and nothing is installed. It needs msgspec, jinja2, tokenizers
# and tqdm beside them, and pytest, hypothesis and safetensors for the tests.
GPU_PYTHON ?=
GPU_SETUP := $(if $(GPU_PYTHON),,setup)
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
