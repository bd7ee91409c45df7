# Needs Python 3.11.4 or newer and make; everything else goes into a virtual environment.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# One more than cores, as those on Ray leave a core idle at times.
PROCESSES ?= 3
PARALLEL := -n $(PROCESSES) --no-loadscope-reorder --durations=20

.PHONY: quickstart test night test-all

quickstart: $(VENV)/installed
	$(BIN)/fedsim run experiments/quickstart.yaml

test: $(VENV)/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@# Beside the tests; its report comes last.
	report=$$(mktemp); $(BIN)/mypy >$$report & mypy=$$!; tests=0; types=0; \
	$(BIN)/pytest $(PARALLEL) || tests=$$?; \
	wait $$mypy || types=$$?; cat $$report; rm $$report; exit $$((tests | types))

night: $(VENV)/installed
	$(BIN)/pytest $(PARALLEL) -m "night or hypothesis" --hypothesis-profile=night

test-all: test night

# In words that old Pythons, from 2.7 on, understand as well.
CHECK := import sys; sys.version_info >= (3, 11, 4) or sys.exit("error: fedsim needs Python \
3.11.4 or newer, and %s is Python %d.%d.%d; name another (and delete \
an old $(VENV)): make quickstart PYTHON=python3.11" % ((sys.executable,) + sys.version_info[:3]))

$(VENV)/installed: pyproject.toml constraints.txt
	@for python in $(PYTHON) $(wildcard $(BIN)/python); do $$python -c '$(CHECK)' || exit; done
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@
