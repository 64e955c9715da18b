# Two commands do everything on a fresh machine with Python 3.11+ and a C compiler:
#   make demo    sets up .venv and trains a small GPT eager, compiled, on two ranks with DDP and on two ranks compiled
#   make test    sets up .venv and runs lint, types and all tests
# More: make lint | types | check | bench | bench-quick | soak | test-long | test-ops | test-spmd | test-parallel | image | clean

PYTHON ?= python3
JOBS   ?= 2
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
# files whose tests draw programs with hypothesis, and those of training loops and of modules, which are drawn from seeds
PROPERTIES := $(shell grep -rl '^@given' tests --include='test_*.py') tests/property/test_random_loops.py \
	tests/parallel/test_random_inits.py
NATIVE := $(wildcard setup.py wholestep/*/*/native/*.c wholestep/*/*/native/*.h)
# torch goes first and by its range alone, so that pip prefers a CPU build where one is at hand
TORCH  := $(shell sed -n 's/^ *"\(torch[<>=][^"]*\)".*/\1/p' pyproject.toml)
# one thread a worker: the workers and the ranks they start are what fills the cores; bytecode is kept, since tests start
# hundreds of interpreters, each of which would compile the package again
LIMIT  := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE=

.PHONY: demo test lint types check bench bench-quick soak test-long test-ops test-spmd test-parallel image clean

demo: $(STAMP)
	$(BIN)/python examples/demo.py

test: lint types check

lint: $(STAMP)
	$(BIN)/ruff check .

types: $(STAMP)
	$(BIN)/mypy

check: $(STAMP)
	$(LIMIT) $(BIN)/pytest -n $(JOBS) -q $(ARGS)

bench: $(STAMP)
	$(BIN)/python -m benchmarks.train_step $(ARGS)
	$(BIN)/python -m benchmarks.capture_scaling

bench-quick: $(STAMP)
	$(BIN)/python -m benchmarks.train_step --quick $(ARGS)

# the long form of the property tests: hours of generated programs if you let it
soak: $(STAMP)
	WHOLESTEP_TEST_LONG=1 $(LIMIT) $(BIN)/pytest -n $(JOBS) -q $(PROPERTIES) $(ARGS)

# the long form of the communication tests: 10,000 random collectives, 1,000 on each layout of hosts, 200 killed ranks,
# 600 programs of ranks that go on, 400 of messages, 100 killed ranks of a job that is restarted
test-long: $(STAMP)
	WHOLESTEP_TEST_LONG=1 $(LIMIT) $(BIN)/pytest -q tests/comm/test_collectives.py tests/comm/test_faults.py \
		tests/comm/test_hosts.py tests/comm/test_ranks_ahead.py tests/comm/test_p2p.py tests/parallel/test_restarts.py $(ARGS)

# every operator and module of torch's own tables, all samples, float32 and float64: half an hour on two cores
test-ops: $(STAMP)
	WHOLESTEP_TEST_LONG=1 $(LIMIT) $(BIN)/pytest -n $(JOBS) -q tests/autograd/test_operators.py tests/trace/test_kernel_layouts.py \
		tests/autograd/test_compiled_backward_operators.py tests/trace/test_host_numbers.py $(ARGS)

# every model's step along one axis and two, and 600 random ones, against one device, 300 against replicas: an hour; then
# twenty steps of six models on 2, 4 and 8 ranks under every plan: an hour
test-spmd: $(STAMP)
	WHOLESTEP_TEST_LONG=1 $(LIMIT) $(BIN)/pytest -n $(JOBS) -q tests/spmd/test_models.py tests/spmd/test_rules.py \
		tests/spmd/test_random_programs.py tests/spmd/test_random_replicas.py $(ARGS)
	$(LIMIT) $(BIN)/python -m tests.support.spmd_equal

# 25 models under each wrapper, hook and mixture of wholestep.parallel, on two and four ranks: an hour
test-parallel: $(STAMP)
	WHOLESTEP_TEST_LONG=1 $(LIMIT) $(BIN)/pytest -q tests/parallel/test_wrapped_models.py $(ARGS)

image: $(STAMP)
	$(BIN)/python docs/draw_pipeline.py

$(STAMP): pyproject.toml $(NATIVE)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "wholestep needs Python 3.11 or later, $(PYTHON) is " + sys.version.split()[0] + ": make PYTHON=python3.12 ...")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q "$(TORCH)"
	$(BIN)/python -m pip install -q -e ".[test,demo,bench]"
	@touch $@

clean:
	rm -rf $(VENV) build demo-out *.egg-info .mypy_cache .ruff_cache .pytest_cache
