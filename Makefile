# make demo | make test | make lint | make gpu; the first two install into .venv on a bare machine.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
RUN_DIR := runs/demo_cp2

.PHONY: demo test lint format schema gpu clean

demo: $(VENV)/installed
	OMP_NUM_THREADS=1 $(BIN)/torchrun --nproc-per-node 2 -m fsdp2kit.run toml/demo_cp2.toml
	$(BIN)/python tools/generate.py $(RUN_DIR)/hf "What is the opposite of wet?" "Tell me the month after June."

test: $(VENV)/installed
	$(BIN)/python -m pytest $(TESTS)

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

# On a machine with a CUDA device, with the torch that is there: installs nothing.
gpu:
	PYTHONPATH=. $(PYTHON) -m pytest -m gpu tests
	PYTHONPATH=. $(PYTHON) tools/bench.py ring
	PYTHONPATH=. $(PYTHON) tools/bench.py gpu

$(VENV)/installed: pyproject.toml .ci/constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint .ci/constraints.txt --editable ".[dev]"
	touch $@

clean:
	rm -rf $(VENV) runs dist
