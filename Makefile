# Two commands do everything on a fresh machine: `make run` and `make test`. Each sets up what it needs and is quick when
# nothing has changed. `make help` lists the rest.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMPS := .stamps
JOBS   ?= 2
NAME   ?= info_startup
SERVE  ?=
TARGET ?= all
SECONDS ?= 60
MINUTES ?= 60
SIGN ?=

# PyPI's torch for Linux is the CUDA build; the CPU build comes from PyTorch's own index. A machine that is set up to find torch
# elsewhere (find-links) is left alone. For a CUDA build: make run TORCH_INDEX='--extra-index-url .../whl/cu130'
TORCH_INDEX ?= $(shell [ "$$(uname)" = Darwin ] || $(PYTHON) -m pip config list 2>/dev/null | grep -q find-links || echo '--extra-index-url https://download.pytorch.org/whl/cpu')

# What a test run must find; a missing one fails instead of being skipped (tests/conftest.py).
export ANYTORCH_TEST_REQUIRE ?= cpu,webgpu-adapter,chromium,compiler,triton,node,minilm,zig

.DEFAULT_GOAL := help
.PHONY: help run demo test test-long test-cpus coverage test-all fuzz test-device test-webgpu-full test-webgpu-pytorch check lint types bench docs format clean debian zig dist release

help: ## list the commands
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-16s %s\n", $$1, $$2}'

run: $(STAMPS)/venv ## the service and its page on http://127.0.0.1:8765, with the embedded models; Ctrl-C stops it
	@$(BIN)/anytorch serve $(SERVE)

demo: $(STAMPS)/venv ## the devices of this machine, a small model on each of them, a search by meaning, a forecast
	@$(BIN)/anytorch demo
	@echo; echo '$$ anytorch embed README.md --search "a model that is too large for the GPU" --k 3'
	@$(BIN)/anytorch embed README.md --search "a model that is too large for the GPU" --k 3
	@echo; echo '$$ anytorch forecast --sample --horizon 6 --samples 5 --seed 1'
	@$(BIN)/anytorch forecast --sample --horizon 6 --samples 5 --seed 1

PYTEST := $(BIN)/python -m pytest -n $(JOBS) --dist worksteal -ra -q

test: $(STAMPS)/dev $(STAMPS)/zig $(STAMPS)/debian $(STAMPS)/mesa $(STAMPS)/matrix-vulkan ## the tests, in parallel, without the long and the slow ones
	@$(PYTEST) -m "not slow and not long and not device"

test-long: $(STAMPS)/dev $(STAMPS)/zig $(STAMPS)/debian $(STAMPS)/mesa $(STAMPS)/matrix-vulkan ## whole programs, the samples of the documentation, what measures for seconds; CI runs it, too
	@$(PYTEST) -m "long and not slow and not device"

test-cpus: $(STAMPS)/dev $(STAMPS)/debian $(STAMPS)/mesa ## the numeric tests as other CPUs compute: without AVX, AVX2, AVX-512 without VNNI
	@$(BIN)/python tools/other_machines.py --jobs $(JOBS)

coverage: $(STAMPS)/dev $(STAMPS)/zig $(STAMPS)/debian $(STAMPS)/mesa $(STAMPS)/matrix-vulkan ## the same, and which lines no test runs (slower)
	@$(PYTEST) -m "not slow and not device" --cov --cov-report=term:skip-covered

test-all: $(STAMPS)/dev $(STAMPS)/zig $(STAMPS)/fuzz $(STAMPS)/debian $(STAMPS)/mesa $(STAMPS)/matrix-vulkan ## every test that needs no accelerator
	@$(PYTEST) -m "not device"

fuzz: $(STAMPS)/dev $(STAMPS)/fuzz $(STAMPS)/debian ## new inputs for the readers of files and the C++: make fuzz TARGET=safetensors SECONDS=600 (list, all)
	@$(BIN)/python -m tests.fuzz.run $(TARGET) --seconds $(SECONDS)

# DEVICE_PYTHON=python3: that one, with what it has and .carry/ (tools/device-carry.sh); nothing is installed.
test-device: $(if $(DEVICE_PYTHON),,$(STAMPS)/dev) ## what needs a real accelerator, against the CPU; DEVICE_PYTHON=python3 installs nothing
	@$(or $(DEVICE_PYTHON),$(BIN)/python) tests/device/run.py

test-webgpu-full: $(STAMPS)/dev $(STAMPS)/debian $(STAMPS)/mesa ## PyTorch's whole operator suite on the webgpu device; renews its table
	@VK_ICD_FILENAMES=$${VK_ICD_FILENAMES:-$(CURDIR)/.cache/mesa/lvp.json} $(BIN)/python -m tests.webgpu.opinfo --all --jobs $(JOBS) --output docs/reference/webgpu-operators.json
	@$(BIN)/python docs/tools/webgpu_operators.py

test-webgpu-pytorch: $(STAMPS)/dev $(STAMPS)/debian $(STAMPS)/mesa ## PyTorch's own device tests on webgpu, beside the CPU; MINUTES=240 runs more of them; renews its page
	@$(BIN)/python -m tests.webgpu.pytorch_suite.run --minutes $(MINUTES) --jobs $(JOBS) --output docs/reference/webgpu-pytorch-tests.json; status=$$?; \
	 $(BIN)/python docs/tools/webgpu_pytorch_tests.py && exit $$status

check: lint types ## lint, types and layers

lint: $(STAMPS)/dev
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/python -m pytest -q -p no:cacheprovider tests/test_layers.py

types: $(STAMPS)/dev
	@$(BIN)/mypy

format: $(STAMPS)/dev ## put the code into shape
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

bench: $(STAMPS)/dev ## run one comparison: make bench NAME=info_startup
	@$(BIN)/python bench/$(NAME).py

docs: $(STAMPS)/dev ## build the documentation into site/, strictly
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

dist: $(STAMPS)/dev $(STAMPS)/zig ## the source distribution, and wheels that carry compiled kernels for four platforms, into dist/
	@JOBS=$(JOBS) $(BIN)/python tools/dist.py

release: $(STAMPS)/dev $(STAMPS)/zig ## checks, dist/, an SBOM and checksums; SIGN=KEY signs them. Uploads nothing
	@JOBS=$(JOBS) $(BIN)/python tools/release.py --sign "$(SIGN)"

clean: ## remove what the other commands made
	@rm -rf $(VENV) $(STAMPS) .cache site build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis .coverage*

# --- set-up ------------------------------------------------------------------------------------------------------------
# A stamp is as new as the files it was made from; deleting .stamps sets up again. The clone's path is part of the virtual
# environment's scripts, so a moved clone makes a new one.

HERE := $(CURDIR)

$(BIN)/python:
	@echo "anytorch: making the virtual environment $(VENV)" >&2
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { echo "anytorch needs Python 3.10 or newer; $(PYTHON) is $$($(PYTHON) --version). Name another: make PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV)

$(STAMPS)/venv: pyproject.toml constraints.txt $(BIN)/python
	@mkdir -p $(STAMPS)
	@[ "$$(cat $(STAMPS)/path 2>/dev/null || echo '$(HERE)')" = '$(HERE)' ] || { rm -rf $(VENV); $(PYTHON) -m venv $(VENV); }
	@echo "anytorch: installing the package and what it needs (torch is large: a few minutes the first time)" >&2
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt $(TORCH_INDEX) --editable '.[all]'
	@echo '$(HERE)' > $(STAMPS)/path
	@touch $@

$(STAMPS)/dev: $(STAMPS)/venv compat/pyproject.toml
	@echo "anytorch: installing the tools for tests, types and documentation" >&2
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade 'pip>=25.1'
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --group dev
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --no-deps --editable ./compat
	@touch $@

$(STAMPS)/fuzz: $(STAMPS)/dev
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --group fuzz
	@touch $@

# zig compiles the wheels' C++ for every platform. In a folder of its own, so that nothing else takes it for this machine's compiler.
$(STAMPS)/zig: tools/carried_kernels.py $(STAMPS)/dev
	@echo "anytorch: installing zig, which compiles the wheels' kernels (and first its own C++ library: a minute)" >&2
	@rm -rf .cache/zig
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --target .cache/zig "$$($(BIN)/python tools/carried_kernels.py --zig)"
	@$(BIN)/python tools/carried_kernels.py linux-x86_64 --warm
	@touch $@

zig: $(STAMPS)/zig

# A C++ compiler builds our kernels and the mock devices; lavapipe is the software Vulkan driver that stands in for a GPU; Chromium
# opens the web page, Node runs its tests. What is there already, from wherever, is not installed.
$(STAMPS)/debian:
	@mkdir -p $(STAMPS)
	@need=""; has() { command -v "$$1" >/dev/null 2>&1; }; \
	 has gcc && has g++ || need="$$need gcc g++"; \
	 has chromium || has google-chrome || need="$$need chromium"; \
	 has node || need="$$need nodejs"; \
	 if has dpkg-query; then for package in libvulkan1 mesa-vulkan-drivers; do \
	   dpkg-query -W -f '$${Status}' $$package 2>/dev/null | grep -q 'install ok installed' || need="$$need $$package"; done; fi; \
	 if [ -z "$$need" ]; then touch $@; \
	 elif ! has apt-get; then \
	   echo "anytorch: this is not Debian; the tests need a C++ compiler, the Vulkan loader, lavapipe, Chromium and Node. Install them, or set ANYTORCH_TEST_REQUIRE=cpu" >&2; touch $@; \
	 elif [ "$$(id -u)" != 0 ] && ! has sudo; then \
	   echo "anytorch: Debian packages are missing and only root can install them. Ask for: apt-get install$$need" >&2; exit 1; \
	 else \
	   echo "anytorch: installing Debian packages:$$need" >&2; \
	   SUDO=$$([ "$$(id -u)" = 0 ] || echo sudo); \
	   $$SUDO apt-get update -qq && DEBIAN_FRONTEND=noninteractive $$SUDO apt-get install -y -qq --no-install-recommends $$need >/dev/null && touch $@; \
	 fi

$(STAMPS)/mesa: tools/software-vulkan.sh $(STAMPS)/debian
	@tools/software-vulkan.sh >/dev/null || echo "anytorch: using the system's lavapipe, which is slower" >&2
	@touch $@

$(STAMPS)/matrix-vulkan: tools/matrix-vulkan.sh $(STAMPS)/debian
	@tools/matrix-vulkan.sh >/dev/null || echo "anytorch: no software Vulkan with cooperative matrices; their tests are skipped" >&2
	@touch $@
