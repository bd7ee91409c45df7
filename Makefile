# Needs Python 3.11.4 or newer and make; everything else goes into a virtual environment.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

.PHONY: quickstart test

quickstart: $(VENV)/installed
	$(BIN)/fedsim run experiments/quickstart.yaml

test: $(VENV)/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@# Beside the tests, of which those on Ray leave a core idle at times; its report comes last.
	report=$$(mktemp); $(BIN)/mypy >$$report & mypy=$$!; tests=0; types=0; \
	$(BIN)/pytest -n 2 --dist loadfile --no-loadscope-reorder --durations=20 || tests=$$?; \
	wait $$mypy || types=$$?; cat $$report; rm $$report; exit $$((tests | types))

$(VENV)/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@
