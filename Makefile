# The one list of commands.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.done
# Threads that spin while they wait for work make two processes on two cores many times slower.
export OMP_WAIT_POLICY ?= PASSIVE

.PHONY: setup ext demo test release-check endings-check test-gpu test-integrations \
  bench bench-gpu kernel-report docs docs-serve lint types check study clean

setup: $(STAMP)  ## a .venv with everything, pinned by requirements/lock.txt

$(STAMP): requirements/lock.txt requirements/peers.txt pyproject.toml setup.py $(shell find csrc -type f)
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	# torch first, by its exact version: a range would take the newest build with gigabytes of CUDA
	$(BIN)/python -c "import torch" 2>/dev/null || $(BIN)/python -m pip install -q torch==2.13.0
	$(BIN)/python -m pip install -q -r requirements/lock.txt
	# second opinions for tests and benches; without their dependencies, which would move our pins
	$(BIN)/python -m pip install -q --no-deps -r requirements/peers.txt
	$(BIN)/python -m pip install -q --no-build-isolation --no-deps -e .
	touch $(STAMP)

ext: setup  ## build the native kernels again, loudly
	GAC_EXT=1 $(BIN)/python setup.py -q build_ext --inplace

demo: setup  ## train a tiny model by five methods and compare them
	$(BIN)/gac demo

test: setup  ## all tests that need no GPU
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not gpu and not release" -n 2 --dist loadfile

release-check: setup  ## build sdist and wheel, install them in a fresh environment, train there
	$(BIN)/python -m pytest -m release tests/test_packages.py

endings-check: setup  ## the kill tests ten times, then how 100 jobs end (half an hour)
	for i in 1 2 3 4 5 6 7 8 9 10; do \
	  $(BIN)/python -m pytest -q tests/test_ranks.py tests/test_resume.py || exit 1; done
	$(BIN)/python -m tests.exit_codes --runs 100

test-gpu:  ## the tests that need a GPU, with the python at hand
	$(PYTHON) -m pytest -m gpu tests/test_*_gpu.py tests/test_batch.py

test-integrations: setup  ## each adapter against its trainer, in an environment of its own
	$(BIN)/python -m tests.integrations.environments

bench: setup  ## kernels against peers on the CPU; writes bench/results/ and the README's table
	$(BIN)/python -m pytest bench -m "not gpu"
	$(BIN)/python -m bench.table

bench-gpu:  ## kernels against peers on the GPU at hand; writes bench/results/
	$(PYTHON) -m pytest bench -m gpu
	$(PYTHON) -m bench.table

study: setup  ## every method on the demo's task, three seeds (about half an hour); docs/methods.md
	$(BIN)/python -m tools.methods_study
	$(BIN)/python -m tools.methods_table

kernel-report: setup  ## compile every kernel for sm_80, sm_90, sm_100; registers, spills, shared memory
	$(BIN)/python -m gac_kernels.inspect

docs: setup  ## the documentation site, docs/_build/html; warnings are errors
	$(BIN)/python -m sphinx -E -W --keep-going -q -b html docs docs/_build/html

docs-serve: docs  ## show it at http://localhost:8000
	$(BIN)/python -m http.server 8000 --directory docs/_build/html

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: setup
	$(BIN)/mypy

check: lint types test  ## what CI runs

clean:
	rm -rf build .venv *.egg-info gac_kernels/*.so
