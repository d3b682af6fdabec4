# make demo | make test | make lint | make gpu; the first two install into .venv on a bare machine.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
RUN_DIR := runs/demo_cp2

.PHONY: demo test lint format schema gpu gpu-out gpu-tests gpu-kernels gpu-loss gpu-1b gpu-3b gpu-8b gpu-profile clean

demo: $(VENV)/installed
	OMP_NUM_THREADS=1 $(BIN)/torchrun --nproc-per-node 2 -m fsdp2kit.run toml/demo_cp2.toml
	$(BIN)/python tools/generate.py $(RUN_DIR)/hf "What is the opposite of wet?" "Tell me the month after June."

test: $(VENV)/installed
	$(BIN)/python -m pytest -n 2 --dist loadfile $(TESTS)

lint: $(VENV)/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/python tools/schema.py --check

format: $(VENV)/installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

schema: $(VENV)/installed
	$(BIN)/python tools/schema.py

# On a machine with a CUDA device, with the torch that is there: installs nothing. Each piece can be started alone, takes
# nine minutes at most, and leaves its results in the folder GPU_OUT, where that is set.
GPU_BENCH = env PYTHONPATH=. $(PYTHON) tools/bench.py
GPU_FILE = $(if $(GPU_OUT),--out $(GPU_OUT)/$@.json)

gpu: gpu-tests gpu-kernels gpu-loss gpu-1b gpu-3b gpu-8b gpu-profile

gpu-out:
	$(if $(GPU_OUT),mkdir -p $(GPU_OUT))

gpu-tests: gpu-out
	timeout 540 env PYTHONPATH=. $(PYTHON) -m pytest -m gpu tests $(if $(GPU_OUT),--junitxml $(GPU_OUT)/$@.xml)

gpu-kernels: gpu-out
	timeout 540 $(GPU_BENCH) ring --max-minutes 7 $(GPU_FILE)

# LOSS_KERNELS="torch liger", where both are there, measures them beside ours.
gpu-loss: gpu-out
	timeout 540 $(GPU_BENCH) vocabulary --tokens 8192 --hidden 4096 --dtype bfloat16 --whole --rounds 20 \
	  --kernels $(LOSS_KERNELS) $(GPU_FILE)

gpu-1b gpu-3b gpu-8b: gpu-out
	timeout 540 $(GPU_BENCH) gpu --groups $(@:gpu-%=%) --max-minutes 7 $(GPU_FILE)

gpu-profile: gpu-out
	timeout 540 $(GPU_BENCH) gpu --groups 1b 8b --profile --max-minutes 7 $(GPU_FILE)

$(VENV)/installed: pyproject.toml .ci/constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint .ci/constraints.txt --editable ".[dev]"
	touch $@

clean:
	rm -rf $(VENV) runs dist
