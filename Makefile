# `make demo` and `make test` need Python (3.11 or later) and pip, and nothing else. `make test-all` needs Python 3.11,
# 3.12, 3.13 and 3.14: where it does not find them, name them with PYTHON311= and so on.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
LOCK ?= requirements.lock

# The Pythons of the other environments that `make test-all` tests on.
PYTHON311 ?= $(shell .ci/find-python 3.11)
PYTHON312 ?= $(shell .ci/find-python 3.12)
PYTHON313 ?= $(shell .ci/find-python 3.13)
PYTHON314 ?= $(shell .ci/find-python 3.14)

# Test workers, and the processes that tests start, share their bytecode.
export PYTHONDONTWRITEBYTECODE :=

# Three workers on two cores: some tests wait for processes that they start.
PYTEST := -m pytest -n 3 --dist worksteal

.PHONY: demo test test-slow test-lowest test-newest test-python3.13 test-python3.14 clients clients-lowest clients-newest accelerators peers-quick faults fuzz kill-test test-all lint types bench docs map pictures dist test-dist clean

demo: $(VENV)/.installed
	$(BIN)/python examples/japanese_vowels.py

test: lint types $(VENV)/.installed
	$(BIN)/python $(PYTEST) -m "not slow"

# The rest: long compositions, examples, benchmarks, other libraries, processes that are killed.
test-slow: $(VENV)/.installed
	$(BIN)/python $(PYTEST) -m slow

# The same as in `make test` on one of the other versions. Flags of JAX can be set: JAX_REMAT3=1 make test-newest.
test-lowest test-newest test-python3.13 test-python3.14: test-%: .envs/%/.installed
	.envs/$*/bin/python $(PYTEST) -m "not slow"

# Compile what loopax does for an H100 and for a TPU, without either: ten minutes. ALL=1 for the whole table.
accelerators: .envs/accelerators/.installed
	JAX_PLATFORMS=cpu .envs/accelerators/bin/python -m pytest -n 2 --dist worksteal -p no:cacheprovider benchmarks/accelerators

# All versions of Python and JAX, and JAX's flags that are to become defaults: three hours.
test-all: $(VENV)/.installed
	.ci/test-all

# Programs on other people's packages, on the lowest JAX that these have and on the newest: at most twelve minutes each.
# In full size: make clients SIZE=whole. Warnings of other people's packages are theirs.
clients: clients-lowest clients-newest
clients-lowest clients-newest: %: .envs/%/.installed
	LOOPAX_CLIENTS=$(or $(SIZE),small) .envs/$*/bin/python -m pytest -n 2 --dist worksteal -W ignore tests/clients

# The peers' own tests on loopax's loops, of Diffrax's the 40 of tests/peers/quick.toml: at most 25 minutes. LOOPAX_PEERS
# names a folder with checkouts (tests/peers/README.md).
peers-quick: $(VENV)/.installed
	$(BIN)/python tests/peers/run.py "$(LOOPAX_PEERS)" --some quick -n 2

# Small wrong edits, one after another: which test notices each? Ten minutes where the tests of noticed.toml do so again.
faults: $(VENV)/.installed
	$(BIN)/python -m tests.faults.run --slow

# Random programs against unrolled Python loops: 5000, or PROGRAMS= for another number. They are numbered, so a run can be
# split over sittings: make fuzz PROGRAMS=1000 FIRST=2000.
fuzz: $(VENV)/.installed
	LOOPAX_FUZZ=$(or $(PROGRAMS),5000) LOOPAX_FUZZ_FIRST=$(or $(FIRST),0) $(BIN)/python $(PYTEST) tests/fuzz

# Fifty runs of ten seconds, each killed at a random moment and resumed.
kill-test: $(VENV)/.installed
	LOOPAX_KILLS=50 $(BIN)/python $(PYTEST) tests/durable/test_kill.py tests/durable/test_gradient_kill.py

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.installed
	$(BIN)/pyright --pythonpath $(BIN)/python

# On the JAX that pip gives: two hours. With the locked one: .venv/bin/python -m benchmarks
bench: .envs/benchmark/.installed
	.envs/benchmark/bin/python -m benchmarks

# The site, built strictly and checked, then all code that it shows (two minutes). Its pictures are committed: drawing
# them runs the examples, which takes several minutes, and is a command of its own.
docs: $(VENV)/.installed
	export LOOPAX_REPOSITORY="$$($(BIN)/python .ci/repository.py)" && $(BIN)/zensical build --clean --strict && \
		PYTHONPATH=. $(BIN)/python docs/check.py
	$(BIN)/python $(PYTEST) tests/project/test_docs.py

# The map of the code in docs/how-it-works.md, from the imports; the list of names in docs/api/index.md, from docstrings.
map: $(VENV)/.installed
	PYTHONPATH=. $(BIN)/python docs/house_map.py
	PYTHONPATH=. $(BIN)/python docs/api_overview.py

pictures: map
	$(BIN)/python docs/pictures.py

# The wheel and the source distribution, each installed and tested in an environment of its own.
dist: $(VENV)/.installed
	rm -rf dist
	$(BIN)/python -m hatchling build --directory dist
	$(MAKE) test-dist

# The files in dist/ on other Pythons: make test-dist PYTHONS="python3.13 python3.14".
PYTHONS ?= $(PYTHON)
test-dist:
	.ci/test-dist $(PYTHONS)

# An environment with exactly the versions of a lock file: $(call install,python,environment,lock). The stamp is made
# last, so that an interrupted installation is done again.
define install
	@test -n "$(1)"
	@echo "Installing what $(3) lists into $(2): about three minutes for the first time, and pip is silent meanwhile."
	$(1) -m venv $(2)
	$(2)/bin/python -m pip install --quiet --requirement $(3)
	$(2)/bin/python -m pip install --quiet --no-deps --no-build-isolation --editable .
	$(2)/bin/python -m pip check
	touch $(2)/.installed
endef

$(VENV)/.installed: $(LOCK) pyproject.toml
	$(call install,$(PYTHON),$(VENV),$(LOCK))

.envs/lowest/.installed: requirements-lowest.lock pyproject.toml
	$(call install,$(PYTHON311),.envs/lowest,$<)

.envs/newest/.installed: requirements-newest.lock pyproject.toml
	$(call install,$(PYTHON312),.envs/newest,$<)

.envs/clients-lowest/.installed: requirements-clients-lowest.lock pyproject.toml
	$(call install,$(PYTHON311),.envs/clients-lowest,$<)

.envs/clients-newest/.installed: requirements-clients-newest.lock pyproject.toml
	$(call install,$(PYTHON312),.envs/clients-newest,$<)

.envs/accelerators/.installed: requirements-accelerators.lock pyproject.toml
	$(call install,$(PYTHON312),.envs/accelerators,$<)

.envs/benchmark/.installed: requirements-benchmark.lock pyproject.toml
	$(call install,$(PYTHON312),.envs/benchmark,$<)

.envs/python3.13/.installed: requirements-newest.lock pyproject.toml
	$(call install,$(PYTHON313),.envs/python3.13,$<)

.envs/python3.14/.installed: requirements-newest.lock pyproject.toml
	$(call install,$(PYTHON314),.envs/python3.14,$<)

clean:
	rm -rf $(VENV) .envs .cache site dist
