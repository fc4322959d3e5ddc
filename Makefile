# Each target sets itself up on a fresh machine: a virtual environment in .venv with the pins of pyproject.toml.
PYTHON ?= python3
BIN := .venv/bin
# Hosted machines without a GPU: PyTorch's CPU build, where pip would otherwise take gigabytes of CUDA libraries.
TORCH_INDEX ?=

.PHONY: run test lint figures clean

run: .venv/installed
	$(BIN)/python experiments/run.py $(ARGS)

test: lint
	$(BIN)/python -m pytest $(ARGS)

lint: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

figures: .venv/installed
	$(BIN)/python -m analysis.report $(or $(RUNS),runs)

.venv/installed: pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) \
		$$(sed -n 's/^    "\(torch==[^"]*\)",/\1/p' pyproject.toml)
	$(BIN)/python -m pip install --quiet -e '.[dev]'
	touch $@

clean:
	rm -rf .venv build *.egg-info
