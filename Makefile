# The project's commands. Each makes or updates the virtual environment first, from the versions pinned
# in constraints/ for the interpreter in use, and does nothing where it is already up to date.
#   make demo     train, evaluate, sample, write report/      make test    the default test suite
#   make lint     ruff check and format check                 make slow    the tests that take long
# Another interpreter: make PYTHON=python3.12 test.  Another environment folder: make VENV=.venv-other test.

PYTHON ?= python3
VENV ?= .venv
JOBS ?= 2
PYTEST_ARGS ?=

VERSION := $(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null)
CONSTRAINTS := $(wildcard constraints/py$(subst .,,$(VERSION)).txt)
PIP := PIP_DISABLE_PIP_VERSION_CHECK=1 $(VENV)/bin/python -m pip
PYTEST := $(VENV)/bin/python -m pytest -n $(JOBS)

.DEFAULT_GOAL := help
.PHONY: help demo test slow lint environment

help:
	@sed -n 's/^#   //p' Makefile

demo: $(VENV)/.installed-$(VERSION)
	$(VENV)/bin/python -m nag_jax.demo

test: environment
	$(PYTEST) $(PYTEST_ARGS)

# The project's own pytest options leave the slow tests out, so they are set aside here.
slow: environment
	$(PYTEST) -o addopts=-q -m slow $(PYTEST_ARGS)

lint: environment
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .

environment: $(VENV)/.installed-test-$(VERSION)

# A folder made by another version of Python is emptied first; its stamps carry that version's name.
$(VENV)/.created-$(VERSION):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { echo "nag_jax needs Python 3.11 or newer, but '$(PYTHON)' is $(or $(VERSION),not a working Python); name another with: make PYTHON=python3.12 ..." >&2; exit 1; }
	$(PYTHON) -m venv --clear $(VENV)
	@touch $@

$(VENV)/.installed-$(VERSION): $(VENV)/.created-$(VERSION) pyproject.toml $(CONSTRAINTS)
	$(call install,.)
	@touch $@

$(VENV)/.installed-test-$(VERSION): $(VENV)/.installed-$(VERSION)
	$(call install,.[test])
	@touch $@

define install
@$(if $(CONSTRAINTS),,echo "NOTE: no pinned versions for Python $(VERSION) in constraints/; installing the newest of everything, which this project was not tested with.")
$(PIP) install -q $(addprefix -c ,$(CONSTRAINTS)) -e '$(1)'
endef
