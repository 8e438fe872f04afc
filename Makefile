# All development commands.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.done
# errors only: warnings are about pip's own configuration
PIP := $(BIN)/python -m pip install -qq --disable-pip-version-check
# Spin-waiting OpenMP threads make two processes on two cores many times slower.
export OMP_WAIT_POLICY ?= PASSIVE
# what `make quick` tests: the loss, the controller, the methods, the command line and the rules of the project
QUICK := $(addprefix tests/,cli control methods/test_methods_values.py methods/test_solvers.py kernels/test_loss.py \
  kernels/test_linear.py kernels/test_reference.py project/test_architecture.py project/test_readme.py)

.PHONY: setup ext demo real quick test test-full test-real test-research release-check test-versions exit-check torture test-newest test-gpu test-integrations \
  bench bench-gpu kernel-report docs docs-serve lint types check clean

setup: $(STAMP)  ## create a .venv with torch and the packages pinned in requirements/lock.txt

$(STAMP): requirements/lock.txt requirements/peers.txt pyproject.toml setup.py $(shell find csrc -type f)
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@# torch first, with an exact version: a range would install the latest build with gigabytes of CUDA
	$(BIN)/python -c "import torch" 2>/dev/null || $(PIP) torch==2.13.0
	$(PIP) -r requirements/lock.txt
	@# reference libraries for tests and benchmarks; no dependencies, which would override our pins
	$(PIP) --no-deps -r requirements/peers.txt
	$(PIP) --no-build-isolation --no-deps -e .
	@touch $(STAMP)

ext: setup  ## rebuild the native kernels; fail on errors
	GAC_EXT=1 $(BIN)/python setup.py -q build_ext --inplace

demo: setup  ## train a tiny model with six methods and compare them
	$(BIN)/gac demo

real: setup  ## post-train a pretrained model of 135 million parameters (downloads 93 MB once)
	$(BIN)/gac demo --real $(MODEL)

test: setup  ## run all tests that do not need a GPU
	# keep bytecode, whatever the environment says: the tests start hundreds of Python processes
	# a crashed worker fails the run and is not replaced: with a new worker, xdist may never end
	PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not gpu and not release" \
	  -n 3 --max-worker-restart=0 --dist loadfile --no-loadscope-reorder

quick: lint types  ## lint, type-check and run the fastest tests, in about two minutes
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -m "not gpu and not release and not full and not slow and not dist" \
	  -n 2 --max-worker-restart=0 --dist loadfile $(QUICK)

test-full: setup  ## run the tests that take minutes each: whole datasets, every kernel, launchers
	$(BIN)/python -m pytest -m full

test-real: setup  ## run the tests with a pretrained model, which is downloaded once (93 MB)
	$(BIN)/python -m pytest -m real

test-research: setup  ## run the tests of the programs in research/, which the product does not import
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --max-worker-restart=0 research/tests

release-check: setup  ## check the packages, the workflows, the hub layout and the versions (gigabytes, half an hour)
	$(BIN)/python -m tools.release_check

test-versions: setup  ## test one wheel on old and new versions of Python and torch; writes docs/reference/index.md
	$(BIN)/python -m tools.versions

exit-check: setup  ## repeat the kill tests ten times
	for i in 1 2 3 4 5 6 7 8 9 10; do \
	  $(BIN)/python -m pytest -q tests/parallel/test_ranks.py tests/faults/test_resume.py || exit 1; done

torture: setup  ## kill runs of all kinds at random times for ten minutes; compare with undisturbed ones
	$(BIN)/python -m tools.torture

test-newest: setup  ## upgrade torch, transformers and TRL in the .venv; test kernels, heads, adapters and models
	$(PIP) --upgrade torch transformers trl
	$(BIN)/python -m gac_kernels.doctor
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not gpu and not release" -n 3 --max-worker-restart=0 \
	  --dist loadfile tests/kernels tests/heads tests/integrations tests/models

test-gpu:  ## run the GPU tests with the system's python, not the .venv
	$(PYTHON) -m pytest -m gpu tests/kernels/test_*gpu.py tests/kernels/test_batch.py

test-integrations: setup  ## test each adapter against its trainer, in a separate environment
	$(BIN)/python -m tools.environments

bench: setup  ## benchmark the CPU kernels against other libraries; writes bench/results/ and docs/benchmarks.md
	$(BIN)/python -m pytest bench -m "not gpu"
	$(BIN)/python -m bench.table

bench-gpu:  ## benchmark the GPU kernels against other libraries; writes bench/results/ and docs/benchmarks.md
	$(PYTHON) -m pytest bench -m gpu
	$(PYTHON) -m bench.table

kernel-report: setup  ## compile all kernels for sm_80, sm_90 and sm_100; report registers, spills and shared memory
	$(BIN)/python -m gac_kernels.inspect

docs: setup  ## build the documentation site in docs/_build/html; warnings are errors
	$(BIN)/python -m sphinx -E -W --keep-going -q -b html docs docs/_build/html

docs-serve: docs  ## serve the site at http://localhost:8000
	$(BIN)/python -m http.server 8000 --directory docs/_build/html

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: setup
	$(BIN)/mypy

check: lint types docs test  ## run everything that CI runs

clean:
	rm -rf build .venv *.egg-info gac_kernels/*.so
