# make demo | rl-demo | test | test-deep | bench | bars AREA=core|cpu|gpu|triton|environments|training|rl|evaluation | ablations | rl-ablations | lint | build
#
# An active virtual environment that has every package named in NEEDED is used as it is and nothing is installed into it;
# otherwise .venv is made here, once. `make demo PYTHON=...` uses that interpreter as it is. An interrupted set-up is just rerun.
TORCH := torch==2.13.0
# Its grader is compared with; what the rest of it needs (docker, datasets) is left out.
SWEBENCH := swebench==5.0.2
NEEDED := torch triton numpy safetensors pybind11 pytest xdist pytest_benchmark hypothesis tokenizers transformers torchao tqdm matplotlib tensorboard rensa rich
NEEDED += ray scipy yaml tomli_w httpx zstandard xxhash fsspec aiohttp prometheus_client cryptography h11
HAS_ALL = import importlib.util as u, sys; sys.exit(any(u.find_spec(name) is None for name in sys.argv[1:]))
RECENT = import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))

ifeq ($(PYTHON)$(VIRTUAL_ENV),$(VIRTUAL_ENV))
  PYTHON := $(if $(VIRTUAL_ENV),$(shell python -c '$(HAS_ALL)' $(NEEDED) && echo python))
endif
ifeq ($(PYTHON),)
  VENV := .venv
  BIN := $(VENV)/bin/
  PYTHON := $(VENV)/bin/python
  CANDIDATES := python3 python3.13 python3.12 python3.11
  BASE = $(shell for p in $(CANDIDATES); do $$p -c '$(RECENT)' 2>/dev/null && echo $$p && break; done)
  TRAINING := $(VENV)/.training
  DEV := $(VENV)/.dev
endif
JOBS ?= 2
SANITIZED := build/sanitized

.PHONY: build demo rl-demo test test-deep bench bars ablations rl-ablations lint
.NOTPARALLEL:

# The compiled core, in place; a second run compiles only what changed.
build: $(TRAINING)
	@$(PYTHON) setup.py -q build_ext --inplace

# A second `make demo` goes on where an interrupted one stopped, or shows the finished one's table again.
demo: build
	$(PYTHON) -m training demo $(if $(wildcard runs/demo/demo.json),--resume)

# Reinforcement learning of a tiny coding agent, in sandboxes. Goes on where an interrupted one stopped.
rl-demo: $(DEV) build
	$(PYTHON) -m rl demo $(if $(wildcard runs/rl-demo/config.json),--resume)

test: $(DEV) build build/oci
	$(PYTHON) -m pytest -n $(JOBS) -m "not slow"

# runc for the tests of sandboxes, where it is not installed: Debian's package unpacked here. Without it those tests are skipped.
build/oci:
	@mkdir -p $@ && if ! command -v runc > /dev/null; then cd $@ && timeout 60 apt-get -qq -o APT::Sandbox::User=root download runc && \
	  dpkg-deb -x runc_*.deb . && ln -s usr/sbin/runc runc && rm runc_*.deb || echo "no runc: its tests will be skipped"; fi

# The tests on a core built with AddressSanitizer and UBSan (in a tree of its own), then the slow ones on the ordinary core.
test-deep: $(DEV) build
	rm -rf $(SANITIZED)
	MXMOE_SANITIZE=1 $(PYTHON) setup.py -q build --build-lib $(SANITIZED)
	cp -r tests benchmarks pyproject.toml README.md $(SANITIZED)
	cd $(SANITIZED) && ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1 \
	  LD_PRELOAD="$$(c++ -print-file-name=libasan.so) $$(c++ -print-file-name=libubsan.so)" \
	  $(if $(VENV),$(CURDIR)/)$(PYTHON) -m pytest -n $(JOBS) -m "not slow and not tree"
	$(PYTHON) -m pytest -n $(JOBS) --dist loadfile -m slow

bench: $(DEV) build
	$(PYTHON) -m pytest benchmarks --benchmark-only
	$(PYTHON) -m benchmarks.scoreboard

bars: $(DEV) build
	$(PYTHON) -m benchmarks.bars $(AREA)

# An hour or two; interrupted, it goes on where it was.
ablations: $(DEV) build
	OMP_NUM_THREADS=1 THP_MEM_ALLOC_ENABLE=1 $(PYTHON) -m benchmarks.ablations

# Hours; interrupted, it goes on where it was. ONLY=demo makes the demo's seeds alone.
rl-ablations: $(DEV) build
	OMP_NUM_THREADS=1 $(PYTHON) -m benchmarks.rl_runs --only "$(ONLY)"

lint: $(DEV)
	$(PYTHON) -m ruff check
	$(PYTHON) -m ruff format --check
	$(BIN)clang-format --dry-run -Werror $$(git ls-files 'csrc/*.cpp' 'csrc/*.h' 'csrc/*.cu')

# Building first shows its progress, which pip would hide; pip then finds everything built.
.venv/.torch:
	$(if $(BASE),,$(error Python 3.11 or newer with its venv module is needed; looked for $(CANDIDATES)))
	$(BASE) -m venv $(VENV)
	$(PYTHON) -m pip install $(TORCH) setuptools cmake ninja pybind11
	touch $@

.venv/.training: .venv/.torch pyproject.toml
	$(PYTHON) setup.py -q build_ext --inplace
	$(PYTHON) -m pip install --no-build-isolation $(TORCH) -e '.[training]'
	touch $@

.venv/.dev: .venv/.torch pyproject.toml
	$(PYTHON) setup.py -q build_ext --inplace
	$(PYTHON) -m pip install --no-build-isolation $(TORCH) -e '.[dev]'
	$(PYTHON) -m pip install --no-deps $(SWEBENCH)
	touch $@ .venv/.training
