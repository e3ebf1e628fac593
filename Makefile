# Every target sets up what it needs in .venv. `make demo` and `make test` need only Python and a package index.
PYTHON ?= python3
TORCH ?= torch==2.13.0
MEGATRON_CORE ?= megatron-core==0.16.1
# Other versions that the suite runs on: the oldest and the newest. 0.14.0 and 0.15.3 also work.
MATRIX ?= 0.12.3 0.19.2
TORCH_MATRIX ?= 2.14.1
BIN := .venv/bin
# Modules are compiled when they are first imported; most of an environment never is.
INSTALL := -m pip install --quiet --disable-pip-version-check --no-compile
# Tests start real jobs on shared machines. So a failed test runs once more, and the summary says RERUN. If the same name
# keeps coming back there, the test or megaprof has a defect.
RUN := -m pytest --reruns 1 -raR
PYTEST := $(BIN)/python $(RUN)
# Number of test files to run at once; JOBS= for one. Increase it only with cores to spare: most tests start two ranks.
JOBS ?= 2
SHARED := $(if $(JOBS),-n $(JOBS) --dist loadfile)
# Compile our sources and the tests once, and not again in every process of a test.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-slow test-matrix test-torch test-ui test-viewers test-hosts test-trainers test-nsys gpu gpu-packages lint format schemas dist \
    bench bench-arrivals bench-capture bench-closing bench-observer bench-overhead bench-packing bench-rehearse bench-replay bench-report bench-scale bench-timeline bench-truth bench-tune bench-whatif clean docs

# Uses an environment with only what it needs (mostly torch), or .venv if that exists.
DEMO := $(if $(wildcard .venv/ready),.venv,.venv/demo)

demo: $(DEMO)/ready
	$(DEMO)/bin/megaprof demo $(ARGS)
	@echo "For the commands above, put megaprof on the path:  . $(DEMO)/bin/activate"

# Takes minutes. Longer tests are in test-slow, and tests that need a host's packages in test-hosts.
test: .venv/ready
	$(PYTEST) $(SHARED) -m "not slow and not hosts" $(ARGS)

# pytest exits with 5 if ARGS chooses no tests. tests/nsys has its own target.
test-slow: .venv/ready
	$(PYTEST) $(SHARED) -m "slow and not hosts" --ignore=tests/nsys $(ARGS) || [ $$? = 5 ]

# The quick tests that touch megatron-core, on other versions of it. `make test-mcore-0.14.0 QUICK=` also runs the slow
# ones.
ON_EACH := $(addprefix tests/,capture hooks integration parallel/test_megatron.py parallel/test_schedules.py \
    testing/test_gpt.py autoload/test_install.py)
QUICK ?= -m "not slow"
test-matrix: $(MATRIX:%=test-mcore-%)

test-mcore-%: .venv/mcore-%/ready
	.venv/mcore-$*/bin/python $(RUN) $(SHARED) $(QUICK) $(ARGS) $(ON_EACH)

# The quick tests that touch torch, on newer versions of it. Each brings CUDA, 5 GB, so CI does not run them.
test-torch: $(TORCH_MATRIX:%=test-torch-%)

test-torch-%: .venv/torch-%/ready
	.venv/torch-$*/bin/python $(RUN) $(SHARED) $(QUICK) $(ARGS) $(addprefix tests/,artifacts capture hooks recorders)

# HTA, TensorBoard's plugin and Perfetto open what megaprof writes. Perfetto's trace processor needs Node.js.
test-viewers: .venv/viewers/ready
	.venv/viewers/bin/python $(RUN) $(ARGS) tests/viewers

# The pages of `megaprof ui` in a real browser. Skipped with a reason if there is no Chromium; axe-core comes from npm.
test-ui: .venv/ui/ready
	.venv/ui/bin/python $(RUN) $(ARGS) tests/browser

# The hosts' own code. Wheels are downloaded; MEGATRON_LM_CHECKOUT and SLIME_CHECKOUT name the checkouts. Tests for which
# something is missing are skipped with a reason.
#
# Runs on MEGATRON_CORE, and then the tests that need a newer megatron-core (Megatron-Bridge, verl with it, the model that
# needs triton) on 0.19.2.
test-hosts: .venv/hosts/ready .venv/hosts-0.19.2/ready
	.venv/hosts/bin/python $(RUN) -m hosts $(ARGS) tests/integrations tests/trainers \
	    --ignore=tests/trainers/on_ray || [ $$? = 5 ]
	.venv/hosts-0.19.2/bin/python $(RUN) $(ARGS) tests/integrations/test_megatron_bridge.py \
	    "tests/hooks/test_real_models.py::test_the_report_says_what_was_built[hybrid]" tests/trainers/test_megatron_bridge_pretrain.py tests/trainers/test_verl_sft.py || [ $$? = 5 ]

# Whole trainers that start their own Ray. Each takes minutes and several GB of memory, so CI does not run them.
SLIME := tests/trainers/on_ray/test_slime_train.py
test-trainers: .venv/trainers-0.19.2/ready .venv/trainers-slime/ready
	.venv/trainers-0.19.2/bin/python $(RUN) $(ARGS) tests/trainers/on_ray --ignore=$(SLIME) || [ $$? = 5 ]
	.venv/trainers-slime/bin/python $(RUN) $(ARGS) $(SLIME) || [ $$? = 5 ]

# The real Nsight Systems, which needs no GPU for NVTX ranges. Skipped with a reason if Debian's package is unavailable.
test-nsys: .venv/ready
	[ -x .venv/nsys/bin/nsys ] || tests/nsys/install.sh .venv/nsys $(BIN)/python || true
	$(PYTEST) $(ARGS) tests/nsys

# The documentation site, in build/site. A broken link, or a page without a link to it, is an error.
docs: .venv/docs/ready
	NO_MKDOCS_2_WARNING=1 .venv/docs/bin/mkdocs build --strict $(ARGS)

# docs/schemas and docs/json.md, from the dataclasses.
schemas: .venv/ready
	$(BIN)/python -m tests.schemas docs

lint: .venv/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

format: .venv/ready
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# A source distribution and manylinux wheels in dist/, with the same bytes for the same commit: times are the commit's (or
# 1980), and debug information is left out because it contains the build directory. There is a wheel for each of
# DIST_PYTHONS that is installed (with pyenv: PYENV_VERSION=3.10:3.11:3.12:3.13 make dist).
DIST_PYTHONS ?= python3.10 python3.11 python3.12 python3.13
dist: export SOURCE_DATE_EPOCH := $(or $(shell git log -1 --format=%ct 2>/dev/null),315532800)
dist: export CFLAGS := -g0
dist: .venv/ready
	rm -rf dist build/wheels
	$(BIN)/python -m build --sdist --outdir dist .
	for each in $(DIST_PYTHONS); do \
	    if ! $$each --version > /dev/null 2>&1; then echo "no wheel for $$each, which is not installed"; continue; fi; \
	    $$each -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir build/wheels dist/*.tar.gz || exit 1; done
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python -m auditwheel repair --wheel-dir dist build/wheels/*.whl

.venv/ready: setup.cfg setup.py megaprof/recorders/_tape.c Makefile
	@echo "Setting up .venv: about 2 GB of packages, some minutes the first time"
	$(PYTHON) -m venv .venv
	$(BIN)/python $(INSTALL) "$(TORCH)" "$(MEGATRON_CORE)" --editable ".[dev]"
	touch $@

# torch's own index has a build without CUDA, which would be several GB.
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
LEAN := .venv/demo/bin/python $(INSTALL)

.venv/demo/ready: setup.cfg setup.py megaprof/recorders/_tape.c Makefile
	@echo "Setting up .venv/demo: 850 MB of packages, some minutes the first time"
	$(PYTHON) -m venv .venv/demo
	$(LEAN) --no-deps --retries 1 --extra-index-url $(TORCH_INDEX) "$(TORCH)"
	$(LEAN) "$(MEGATRON_CORE)" "$(TORCH)" --editable ".[ui]"
	touch $@

.PRECIOUS: .venv/mcore-%/ready

# One environment per version on top of .venv: it uses torch and the tools from there, and its own megatron-core.
.venv/mcore-%/ready: .venv/ready
	$(BIN)/python -m venv .venv/mcore-$*
	base=$$($(BIN)/python -c "import site; print(site.getsitepackages()[0])"); \
	own=$$(.venv/mcore-$*/bin/python -c "import site; print(site.getsitepackages()[0])"); \
	echo "import site; site.addsitedir('$$base')" > $$own/base.pth
	.venv/mcore-$*/bin/python $(INSTALL) --no-deps --ignore-requires-python \
	    "megatron-core==$*" $(if $(filter 0.17.% 0.18.% 0.19.%,$*),einops triton)
	touch $@

.PRECIOUS: .venv/torch-%/ready

.venv/torch-%/ready: .venv/ready
	$(BIN)/python -m venv .venv/torch-$*
	.venv/torch-$*/bin/python $(INSTALL) "torch==$*"
	base=$$($(BIN)/python -c "import site; print(site.getsitepackages()[0])"); \
	own=$$(.venv/torch-$*/bin/python -c "import site; print(site.getsitepackages()[0])"); \
	echo "import site; site.addsitedir('$$base')" > $$own/base.pth
	touch $@

# One for the viewers, which install half of Jupyter.
.venv/viewers/ready: .venv/ready
	$(BIN)/python -m venv .venv/viewers
	base=$$($(BIN)/python -c "import site; print(site.getsitepackages()[0])"); \
	own=$$(.venv/viewers/bin/python -c "import site; print(site.getsitepackages()[0])"); \
	echo "import site; site.addsitedir('$$base')" > $$own/base.pth
	.venv/viewers/bin/python $(INSTALL) --editable ".[viewers]" "$(TORCH)"
	touch $@

# One for the browser's driver, and for axe-core if npm is installed.
.venv/ui/ready: .venv/ready
	$(BIN)/python -m venv .venv/ui
	base=$$($(BIN)/python -c "import site; print(site.getsitepackages()[0])"); \
	own=$$(.venv/ui/bin/python -c "import site; print(site.getsitepackages()[0])"); \
	echo "import site; site.addsitedir('$$base')" > $$own/base.pth
	.venv/ui/bin/python $(INSTALL) --editable ".[browser]" "$(TORCH)"
	cd .venv/ui && if command -v npm > /dev/null; then \
	    tar -xzf "$$(npm pack --silent axe-core@4)" package/axe.min.js; fi
	touch $@

# One for the hosts, which install half of Hugging Face.
.venv/hosts/ready: .venv/ready
	$(BIN)/python -m venv .venv/hosts
	base=$$($(BIN)/python -c "import site; print(site.getsitepackages()[0])"); \
	own=$$(.venv/hosts/bin/python -c "import site; print(site.getsitepackages()[0])"); \
	echo "import site; site.addsitedir('$$base')" > $$own/base.pth
	.venv/hosts/bin/python $(INSTALL) --editable ".[hosts]" "$(TORCH)"
	touch $@

DOCS := print(*p['options.extras_require']['docs'].split())

# One for the documentation, which reads the sources.
.venv/docs/ready: setup.cfg Makefile
	$(PYTHON) -m venv .venv/docs
	.venv/docs/bin/python $(INSTALL) \
	    $$($(PYTHON) -c "import configparser as c; p = c.ConfigParser(); p.read('setup.cfg'); $(DOCS)")
	touch $@

# On top of .venv/hosts, with the megatron-core that Megatron-Bridge needs and the transformers that verl requires.
.venv/hosts-0.19.2/ready: .venv/hosts/ready
	$(BIN)/python -m venv .venv/hosts-0.19.2
	base=$$(.venv/hosts/bin/python -c "import site; print(site.getsitepackages()[0])"); \
	own=$$(.venv/hosts-0.19.2/bin/python -c "import site; print(site.getsitepackages()[0])"); \
	echo "import site; site.addsitedir('$$base')" > $$own/base.pth
	.venv/hosts-0.19.2/bin/python $(INSTALL) --no-deps --ignore-requires-python \
	    megatron-core==0.19.2
	.venv/hosts-0.19.2/bin/python $(INSTALL) transformers==5.9.0
	touch $@

# On top of that one, with what trainers on Ray also import.
.venv/trainers-0.19.2/ready: .venv/hosts-0.19.2/ready
	$(BIN)/python -m venv .venv/trainers-0.19.2
	base=$$(.venv/hosts-0.19.2/bin/python -c "import site; print(site.getsitepackages()[0])"); \
	own=$$(.venv/trainers-0.19.2/bin/python -c "import site; print(site.getsitepackages()[0])"); \
	echo "import site; site.addsitedir('$$base')" > $$own/base.pth
	.venv/trainers-0.19.2/bin/python $(INSTALL) --no-deps \
	    TransferQueue==0.1.11 cachetools==8.0.1 pybase64==1.5.1 pyzmq==27.3.0 zstandard==0.25.0
	touch $@

# slime refuses NumPy 2, later releases of pyarrow refuse NumPy 1, and slime is made for the older megatron-core.
.venv/trainers-slime/ready: .venv/hosts/ready
	$(BIN)/python -m venv .venv/trainers-slime
	base=$$(.venv/hosts/bin/python -c "import site; print(site.getsitepackages()[0])"); \
	own=$$(.venv/trainers-slime/bin/python -c "import site; print(site.getsitepackages()[0])"); \
	echo "import site; site.addsitedir('$$base')" > $$own/base.pth
	.venv/trainers-slime/bin/python $(INSTALL) --no-deps \
	    numpy==1.26.4 pyarrow==20.0.0
	touch $@

# Everything that needs a GPU, on a machine that has one, within eight minutes; see docs/gpu.md. PYTHON_GPU is an interpreter with CUDA's torch,
# perhaps from an image that has nothing else. `make gpu-packages`, here or on another machine, puts the other packages
# into build/gpu for the Python of that image. Copy build/gpu with the checkout, and set PYTHONPATH=build/gpu.
PYTHON_GPU ?= $(BIN)/python
gpu: $(if $(filter $(BIN)/python,$(PYTHON_GPU)),.venv/ready)
	$(PYTHON_GPU) setup.py --quiet build_ext --inplace || true
	$(PYTHON_GPU) -m tests.gpu --docs docs/gpu.md $(ARGS)

GPU_PYTHON_VERSION ?= 3.12
gpu-packages:
	$(PYTHON) -m pip install --quiet --disable-pip-version-check --upgrade --no-deps --no-compile --target build/gpu \
	    --python-version $(GPU_PYTHON_VERSION) --only-binary :all: \
	    $(foreach each,2_28 2_27 2_17 2_24,--platform manylinux_$(each)_x86_64) --platform manylinux2014_x86_64 \
	    "$(MEGATRON_CORE)" fsspec isal jinja2 markdown-it-py markupsafe mdurl msgspec nvtx pygments rich

# The figures of docs/benchmarks.md, each from one command; the last line of output is JSON.
bench: bench-arrivals bench-capture bench-closing bench-observer bench-overhead bench-packing bench-rehearse bench-replay bench-report bench-timeline bench-scale bench-truth bench-tune bench-whatif

bench-arrivals: .venv/ready
	$(BIN)/python -m tests.benchmarks.arrivals $(ARGS)

bench-capture: .venv/ready
	$(BIN)/python -m tests.benchmarks.capture $(or $(ARGS),--pairs 5)

bench-closing: .venv/ready
	$(BIN)/python -m tests.benchmarks.closing $(ARGS)

bench-observer: .venv/ready
	$(BIN)/python -m tests.benchmarks.observer $(ARGS)

bench-overhead: .venv/ready
	$(BIN)/python -m tests.benchmarks.overhead $(ARGS)

bench-rehearse: .venv/ready
	$(BIN)/python -m tests.benchmarks.rehearse $(ARGS)

bench-replay: .venv/ready
	$(BIN)/python -m tests.benchmarks.replay $(ARGS)

bench-report: .venv/bench
	$(BIN)/python -m tests.benchmarks.report $(ARGS)

bench-timeline: .venv/ready
	$(BIN)/python -m tests.benchmarks.timeline $(ARGS)

bench-packing: .venv/ready
	$(BIN)/python -m tests.benchmarks.packing $(ARGS)

bench-tune: .venv/ready
	$(BIN)/python -m tests.benchmarks.tune $(ARGS)

bench-whatif: .venv/ready
	$(BIN)/python -m tests.benchmarks.whatif $(ARGS)

# For one pipeline: make bench-truth ARGS="--seed 20261122 --only 17 --keep DIR"
bench-truth: .venv/ready
	$(BIN)/python -m tests.benchmarks.truth $(ARGS)

# 16,384 ranks; for a quick run: make bench-scale ARGS="--ranks 1024"
bench-scale: .venv/ready
	$(BIN)/python -m tests.benchmarks.scale $(ARGS)

.venv/bench: .venv/ready
	$(BIN)/python $(INSTALL) --editable ".[bench]" "$(TORCH)"
	touch $@

clean:
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist *.egg-info megaprof/recorders/*.so
