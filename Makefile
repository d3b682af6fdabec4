# make demo | make test | make test-all | make lint | make gpu | make test-oldest; each installs what it needs into .venv,
# but for `make gpu`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
OLDEST := .venv-oldest
RUN_DIR := runs/demo_cp2

GPU_PIECES := gpu-first gpu-tests gpu-ranks gpu-3b gpu-profile gpu-moe gpu-profile-moe gpu-float8 gpu-1b gpu-8b gpu-hybrid \
  gpu-profile-hybrid gpu-loss gpu-lora gpu-load gpu-update
.PHONY: demo test test-all test-oldest lint format schema gpu gpu-out $(GPU_PIECES) clean

demo: $(VENV)/installed
	OMP_NUM_THREADS=1 $(BIN)/fsdp2kit run toml/demo_cp2.toml --nproc 2
	$(BIN)/fsdp2kit generate $(RUN_DIR)/hf "What is the opposite of wet?" "Tell me the month after June."

PYTEST := python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

# Each guarantee once: under 4 minutes on two cores. What needs an extra that is not installed is skipped.
test: $(VENV)/installed
	$(BIN)/$(PYTEST) $(TESTS)

test-all: $(VENV)/installed
	$(BIN)/$(PYTEST) --full $(TESTS)

# The same on the oldest versions that are supported, in an environment of their own: PYTHON=python3.12 is what the first
# of them came with. torch brings 5 GB of CUDA along; what needs trl, which wants newer ones, is skipped.
test-oldest: $(OLDEST)/installed
	$(OLDEST)/bin/$(PYTEST) --full $(TESTS)

lint: $(VENV)/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/python tools/schema.py --check
	$(BIN)/python tools/api.py --check

format: $(VENV)/installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

schema: $(VENV)/installed
	$(BIN)/python tools/schema.py
	$(BIN)/python tools/api.py

# On a machine with a CUDA device, with the torch that is there: installs nothing. The pieces are in the order of their
# worth, each can be started alone and ends within its limit, 54 minutes in all; results go to the folder GPU_OUT, where
# that is set (docs/cuda.md). GPU_DEVICE=cpu tries them without a device, on tiny shapes. With GPU_VARIANTS a piece that
# times or traces steps takes only these variants: make gpu-3b GPU_VARIANTS='"bfloat16, compiled"'.
GPU_ENV = env PYTHONPATH=.$(if $(PYTHONPATH),:$(PYTHONPATH)) PYTHONUNBUFFERED=1 $(if $(GPU_TRY),TRY_ON_CPU=1)
GPU_TRY = $(filter cpu,$(GPU_DEVICE))
GPU_BENCH = $(GPU_ENV) $(PYTHON) tools/bench.py
GPU_FILE = $(if $(GPU_OUT),--out $(GPU_OUT)/$@.json)
GPU_DRY = $(if $(GPU_TRY),--device cpu --dry-run)
GPU_STEPS = $(GPU_BENCH) gpu $(GPU_DRY) $(GPU_FILE) $(if $(GPU_VARIANTS),--variants $(GPU_VARIANTS)) --groups
# pytest takes an interrupt as its end, and writes what it found. A warning is no failure on versions not yet tried.
GPU_PYTEST = $(GPU_ENV) $(PYTHON) -m pytest -m gpu -W default -o junit_family=xunit1 --continue-on-collection-errors $(if $(GPU_OUT),--junitxml $(GPU_OUT)/$@.xml)
GPU_TESTS = $(filter-out tests/gpu/test_first.py $(GPU_RANKS),$(shell grep -rl --include='*.py' mark.gpu tests))
GPU_RANKS = tests/gpu/test_several_ranks.py
GPU_LIMIT = timeout --signal=INT --kill-after=30

gpu: gpu-out
	$(MAKE) --keep-going $(GPU_PIECES); status=$$?; \
	$(if $(GPU_OUT),$(GPU_BENCH) report $(GPU_OUT) > $(GPU_OUT)/report.md;) exit $$status

gpu-out:
	$(if $(GPU_OUT),mkdir -p $(GPU_OUT))

gpu-first: gpu-out
	$(GPU_LIMIT) 150 $(GPU_PYTEST) tests/gpu/test_first.py

gpu-tests: gpu-out
	$(GPU_LIMIT) 270 $(GPU_PYTEST) $(if $(GPU_TRY),--collect-only) $(GPU_TESTS)

# Each test starts processes of its own, which mostly wait.
gpu-ranks: gpu-out
	$(GPU_LIMIT) 300 $(GPU_PYTEST) -n 4 --dist load $(GPU_RANKS)

gpu-3b gpu-1b: gpu-out
	$(GPU_LIMIT) 300 $(GPU_STEPS) $(@:gpu-%=%) --max-minutes 3.5

gpu-8b: gpu-out
	$(GPU_LIMIT) 240 $(GPU_STEPS) 8b --max-minutes 3

gpu-float8: gpu-out
	$(GPU_LIMIT) 300 $(GPU_STEPS) float8_3b float8_8b --max-minutes 4

gpu-moe: gpu-out
	$(GPU_LIMIT) 200 $(GPU_STEPS) moe --max-minutes 2.2

gpu-hybrid: gpu-out
	$(GPU_LIMIT) 180 $(GPU_STEPS) hybrid --max-minutes 1.5

gpu-lora: gpu-out
	$(GPU_LIMIT) 190 $(GPU_STEPS) lora_16k lora_4k --max-minutes 2.2

gpu-loss: gpu-out
	$(GPU_LIMIT) 90 $(GPU_BENCH) vocabulary $(if $(GPU_TRY),--device cpu --tokens 64 --vocabulary 1000,--tokens 8192 \
	  --hidden 4096 --dtype bfloat16 --whole --rounds 20) $(GPU_FILE)

gpu-load: gpu-out
	$(GPU_LIMIT) 90 $(GPU_BENCH) load --files 4 --dtype bfloat16 --rounds 2 --params $(if $(GPU_TRY),0.001 --device cpu,1) $(GPU_FILE)

gpu-update: gpu-out
	$(GPU_LIMIT) 150 $(GPU_BENCH) update --params $(if $(GPU_TRY),0.0001 --rounds 3 --device cpu,1) $(GPU_FILE)

gpu-profile gpu-profile-moe: GPU_VARIANTS = "bfloat16, compiled" bfloat16
gpu-profile-hybrid: GPU_VARIANTS = bfloat16
gpu-profile: gpu-out
	$(GPU_LIMIT) 220 $(GPU_STEPS) 3b 1b --profile --max-minutes 2.5

gpu-profile-moe gpu-profile-hybrid: gpu-out
	$(GPU_LIMIT) 130 $(GPU_STEPS) $(@:gpu-profile-%=%) --profile --max-minutes 1.5

$(VENV)/installed: pyproject.toml .ci/constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint .ci/constraints.txt --editable ".[dev]"
	touch $@

$(OLDEST)/installed: pyproject.toml .ci/oldest.txt
	$(PYTHON) -m venv $(OLDEST)
	$(OLDEST)/bin/python -m pip install --quiet --constraint .ci/oldest.txt --editable ".[dev,lowbit]" accelerate
	touch $@

clean:
	rm -rf $(VENV) $(OLDEST) runs dist
