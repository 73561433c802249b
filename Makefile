# make train     set up, train a small model on the CPU, write a text, leave a record, a log, a plot and a page
# make setup     create .venv and install what every command needs
# make test      set up, run the tests
# make lint      set up, run the linter and the type checker
# make test-all  set up, run both and the slow tests, with every process started anew
# make speedrun  set up, measure on a GPU how soon AdamW and Muon reach the same loss (docs/time_to_loss.md)
# make chaos     set up, run the tests that take minutes: hundreds of kills, faults of every kind
# make clean     remove .venv, caches, and what make train and the smoke configs have written
# make help      print this
PYTHON ?= python3
VENV ?= .venv
OUT ?= out-quickstart
BIN := $(VENV)/bin
# --no-compile: Python compiles what it imports; pip would compile all files, which takes 37 s of one core.
PIP = $(BIN)/python -m pip install --quiet --no-compile
FAILED = { echo "the packages could not be installed. Behind a proxy: export HTTPS_PROXY=http://HOST:PORT. Without a \
network, in a folder that is an environment with them: touch FOLDER/.installed; make train VENV=FOLDER" >&2; exit 1; }

# The tests start hundreds of processes that import the project: its compiled files spare a tenth of the time.
test test-all chaos: export PYTHONDONTWRITEBYTECODE :=

.PHONY: help setup train speedrun test test-all chaos lint clean

setup: $(VENV)/.installed

train: $(VENV)/.installed
	$(BIN)/python data/quickstart/prepare.py
	rm -rf $(OUT)/checkpoints-before-*  # a run moves older checkpoints aside once; this one can be repeated
	$(BIN)/python train.py config/quickstart.py --out_dir=$(OUT)
	$(BIN)/python plots/plot_single_run.py "$$(ls -t $(OUT)/run_*[0-9].json | head -n 1)"
	$(BIN)/python plots/report.py "$$(ls -t $(OUT)/run_*[0-9].json | head -n 1)"
	$(BIN)/python sample.py --out_dir=$(OUT) --prompt="def main(" --max_new_tokens=100
	@echo && tail -n 5 "$$(ls -t $(OUT)/run_*[0-9].log | head -n 1)"  # the run's summary

speedrun: $(VENV)/.installed
	$(BIN)/python -m bench.time_to_loss $(SPEEDRUN)

test: $(VENV)/.installed-dev
	$(BIN)/python -m pytest --numprocesses=3 --dist=loadfile --no-loadscope-reorder

test-all: $(VENV)/.installed-dev lint
	NANOMFU_COLD_PROCESSES=1 $(BIN)/python -m pytest -m "not chaos" --numprocesses=3 --dist=loadfile --no-loadscope-reorder

chaos: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -m chaos

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

$(VENV)/.installed: requirements.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "Python 3.10 or newer is needed")'
	$(PYTHON) -m venv $(VENV)
	$(PIP) -r requirements.txt || $(FAILED)
	touch $@

$(VENV)/.installed-dev: $(VENV)/.installed requirements/dev.txt requirements/data.txt requirements/test.txt requirements/trackers.txt
	$(PIP) -r requirements/dev.txt || $(FAILED)
	touch $@

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache .mypy_cache out-quickstart out-smoke-*

help:
	@sed -n 's/^# \(make .*\)/\1/p' $(firstword $(MAKEFILE_LIST))
