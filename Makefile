# Two commands from a fresh clone, with Python 3.11 or newer and nothing else: make demo, make test.
# PYTHON=/path/to/python3.13 chooses the interpreter; ARGS=... goes to pytest, the demo or the benchmarks.
# make test runs tests side by side; ARGS="-n 0" runs them one after the other.
# make test-all runs the campaigns after them, of which make test does a share: hours, or MINUTES=30 of them after some
# minutes of random examples.
# make test-hosts runs the tests of the programs that stand on Anabranch, each in an environment of its own;
# make test-hosts-huey those of one.
# make docs makes the documentation a site, in build/site.

PYTHON ?= python3
VENV = .venv
BIN = $(VENV)/bin
PARALLEL = --numprocesses auto --maxprocesses 4 --dist worksteal
PIP = $(BIN)/python -m pip --disable-pip-version-check install --quiet --no-compile

MINUTES = 0
APPENDING = adapters/wal/appending
COMPILED = adapters/system/compiled_loops.pyx adapters/system/crc32c.h $(APPENDING)/compiled_appender.pyx \
    $(APPENDING)/appender.c $(APPENDING)/appender.h

HOSTS = $(patsubst tests/hosts/%/requirements.txt,%,$(wildcard tests/hosts/*/requirements.txt))
HOST_VENVS = .venv-hosts
DOCS_VENV = $(HOST_VENVS)/docs

PYTHONS = $(PYTHON)
DIST = dist

.PHONY: demo test test-pure test-hosts $(HOSTS:%=test-hosts-%) campaigns test-all lint format docs bench wheels clean

demo: $(VENV)/.installed-all
	@$(BIN)/python -m examples.demo $(ARGS)

test: $(VENV)/.installed-dev
	@$(BIN)/python -m pytest $(PARALLEL) $(ARGS)

# The tests of what is compiled, with all of it in Python (adapters/system/acceleration.py).
test-pure: $(VENV)/.installed-dev
	@ANABRANCH_PURE=1 $(BIN)/python -m pytest $(PARALLEL) tests/adapters tests/journal tests/wal \
	    tests/contract/test_journal.py -k "not (TestJournalPeriodic or TestJournalNever)" $(ARGS)

# They see neither the conftest.py nor the strictness of the others: the warnings of those programs are not ours.
test-hosts: $(HOSTS:%=test-hosts-%)

# A host whose program needs a newer Python than the tests' says so in its python.txt; where there is none it is left out.
$(HOSTS:%=test-hosts-%): test-hosts-%: $(HOST_VENVS)/%/.installed
	@[ ! -x $(HOST_VENVS)/$*/bin/python ] || \
	    PYTHONPATH=$(CURDIR)/src $(HOST_VENVS)/$*/bin/python -m pytest --confcutdir tests/hosts -m "" \
	    -o filterwarnings=default $(ARGS) tests/hosts/$*

campaigns: $(VENV)/.installed-dev
	@$(BIN)/python -m pytest $(PARALLEL) -m "hypothesis and not campaign" --hypothesis-profile campaign \
	    -o faulthandler_timeout=0 $(ARGS)
	@$(BIN)/python -m pytest $(PARALLEL) -m campaign --campaign-minutes $(MINUTES) \
	    -o faulthandler_timeout=0 $(ARGS)

test-all: test campaigns

lint: $(VENV)/.installed-dev
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check
	@$(BIN)/python -m mypy
	@$(BIN)/python tests/packaging/typed.py
	@$(BIN)/lint-imports --no-logo --no-cache

format: $(VENV)/.installed-dev
	@$(BIN)/ruff check --fix
	@$(BIN)/ruff format

docs: $(DOCS_VENV)/.installed
	@NO_MKDOCS_2_WARNING=1 $(DOCS_VENV)/bin/python -m mkdocs build --strict --config-file .ci/site/mkdocs.yml $(ARGS)

bench: $(VENV)/.installed-dev
	@$(BIN)/python -m tests.bench $(ARGS)

# The sdist, and of it a wheel for each interpreter: make wheels PYTHONS="python3.11 /path/to/python3.13". (pip would take
# from its cache what it has made of another sdist of this name.)
wheels: $(VENV)/.installed-dev
	@$(BIN)/python -m build --sdist --outdir $(DIST) . >/dev/null
	@for python in $(PYTHONS); do \
	    $(BIN)/python -m pip --disable-pip-version-check --python "$$(command -v $$python)" wheel --quiet --no-deps \
	        --no-cache-dir --wheel-dir $(DIST) $(DIST)/*.tar.gz || exit 1; \
	done
	@for wheel in $(DIST)/*-linux_*.whl; do \
	    PATH="$(abspath $(BIN)):$$PATH" auditwheel repair --wheel-dir $(DIST) "$$wheel" 2>/dev/null && rm "$$wheel" || :; \
	done

clean:
	rm -rf $(VENV) $(HOST_VENVS) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis \
	    adapters/system/compiled_loops.c $(APPENDING)/compiled_appender.c adapters/system/*.so $(APPENDING)/*.so

# (A tree that came as an sdist has no links.)
$(VENV)/.made:
	@$(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 11))" 2>/dev/null || { \
	    echo "$(PYTHON) is not Python 3.11 or newer; name one that is: make PYTHON=/path/to/python3.13 ..." >&2; exit 1; }
	@cd src/anabranch && for room in router adapters policies; do [ -e $$room ] || ln -s ../../$$room; done
	@$(PYTHON) -m venv $(VENV) || { \
	    echo "$(PYTHON) cannot make a virtual environment (on Debian: apt-get install python3-venv)" >&2; exit 1; }
	@touch $@

# A stamp for each set of extras; older than pyproject.toml or what is compiled, it is installed again.
$(VENV)/.installed-all: $(VENV)/.made pyproject.toml $(COMPILED)
	@echo "Installing Anabranch and its advisor into $(VENV): 1.3 GB, some minutes."
	@$(PIP) --editable ".[all]"
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.made pyproject.toml $(COMPILED)
	@echo "Installing Anabranch and its tests into $(VENV): 1.3 GB, some minutes."
	@$(PIP) --editable ".[dev]"
	@touch $@ $(VENV)/.installed-all

# The environment of one host: what is pinned, with the names and needs of this tree, and beside it the sdists whose tests
# are run here. The modules are the tree's own, as `make` has compiled them; the wheel, which has the entry points, is not.
# For another Python the wheel is made anew, and nothing is compiled.
$(HOST_VENVS)/%/.installed: tests/hosts/%/requirements.txt $(HOST_VENVS)/.wheel
	@rm -rf $(@D) && mkdir -p $(@D)
	@least=$$(cat tests/hosts/$*/python.txt 2>/dev/null || echo 3.11); \
	for python in $(BIN)/python python3.14 python3.13 python3.12 \
	        $$(for found in 3.14 3.13 3.12; do echo "$$(pyenv prefix $$found 2>/dev/null)/bin/python"; done); do \
	    "$$python" -c "import sys, venv; sys.exit(sys.version_info < ($$(echo $$least | tr . ,)))" 2>/dev/null && break; \
	    python=; \
	done; \
	[ -n "$$python" ] || { echo "== NO PYTHON $$least: the tests of $* are left out"; exit 0; }; \
	echo "Installing Anabranch and $* into $(@D)."; \
	wheel=$$(echo $(HOST_VENVS)/dist/*.whl) extra=; \
	! grep -q '^$* = ' pyproject.toml || extra="[$*]"; \
	[ "$$python" = $(BIN)/python ] || wheel=.; \
	"$$python" -m venv --without-pip $(@D) && \
	CC=false $(BIN)/python -m pip --disable-pip-version-check --python $(@D)/bin/python install --quiet --no-compile \
	    "$$wheel$$extra" --requirement tests/hosts/$*/requirements.txt
	@mkdir $(@D)/sdists && if [ -x $(@D)/bin/python ] && [ -e tests/hosts/$*/sdists.txt ]; then \
	    $(BIN)/python -m pip --disable-pip-version-check --python $(@D)/bin/python download --quiet \
	        --no-deps --no-binary :all: --dest $(@D)/sdists --requirement tests/hosts/$*/sdists.txt || exit 1; \
	    for sdist in $(@D)/sdists/*.tar.gz; do tar -xzf "$$sdist" -C $(@D)/sdists || exit 1; done; \
	fi
	@[ ! -x $(@D)/bin/python ] || touch $@

# That of the site reads the modules, and runs none: what the extra `docs` names, without Anabranch.
$(DOCS_VENV)/.installed: $(VENV)/.made pyproject.toml
	@echo "Installing what makes the site into $(@D)."
	@rm -rf $(@D) && $(BIN)/python -m venv --without-pip $(@D)
	@$(BIN)/python -c 'import tomllib; project = tomllib.load(open("pyproject.toml", "rb"))["project"]; \
	    print(*project["optional-dependencies"]["docs"], sep="\n")' >$(@D)/requirements.txt
	@$(BIN)/python -m pip --disable-pip-version-check --python $(@D)/bin/python install --quiet --no-compile \
	    --requirement $(@D)/requirements.txt
	@touch $@

$(HOST_VENVS)/.wheel: $(VENV)/.made pyproject.toml
	@rm -rf $(HOST_VENVS)/dist
	@CC=false $(BIN)/python -m pip --disable-pip-version-check wheel --quiet --no-deps --wheel-dir $(HOST_VENVS)/dist .
	@touch $@
