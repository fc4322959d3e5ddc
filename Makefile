# Each target sets itself up on a fresh machine: a virtual environment in .venv with the pins of requirements.lock.
PYTHON ?= python3
BIN := .venv/bin
# Hosted machines without a GPU: PyTorch's CPU build, where pip would otherwise take gigabytes of CUDA libraries.
TORCH_INDEX ?=
# PyTorch comes first, because its index holds few other packages.
install_torch = $(1)/python -m pip install --quiet --upgrade pip && \
	$(1)/python -m pip install --quiet $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) $$(grep '^torch==' requirements.lock)

.PHONY: run test lint study report-study bench figures lock clean

run: .venv/installed
	$(BIN)/python experiments/run.py $(ARGS)

test: lint
	$(BIN)/python -m pytest $(ARGS)

lint: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# What no row of study/rows covers. QUICK=1 gives every claim with few seeds and rows of its own, in half an hour.
study: .venv/installed
	$(BIN)/python -m study $(if $(QUICK),--quick --rows build/study/rows) $(ARGS)
	$(if $(QUICK),$(BIN)/python -m study report --folder build/study)

report-study: .venv/installed
	$(BIN)/python -m study report

bench: .venv/installed
	$(BIN)/python benchmarks/bench.py $(ARGS)

figures: .venv/installed
	$(BIN)/python -m analysis.report $(or $(RUNS),runs)

.venv/installed: requirements.lock
	$(PYTHON) -m venv .venv
	$(call install_torch,$(BIN))
	$(BIN)/python -m pip install --quiet -r requirements.lock -e '.[dev]'
	touch $@

# The newest versions in the ranges of pyproject.toml. PyTorch stays: edit its line of requirements.lock first.
lock:
	rm -rf .lock
	$(PYTHON) -m venv .lock
	$(call install_torch,.lock/bin)
	.lock/bin/python -m pip install --quiet $$(grep '^torch==' requirements.lock) '.[dev]'
	grep '^#' requirements.lock > .lock/requirements
	.lock/bin/python -m pip freeze --all --exclude pip --exclude otb | sed 's/+[^+]*$$//' >> .lock/requirements
	mv .lock/requirements requirements.lock
	rm -rf .lock build otb.egg-info

clean:
	rm -rf .venv .lock .mypy_cache build *.egg-info
