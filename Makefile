# Every target installs .venv first if it is missing or out of date; `make demo` and `make test` need nothing else.
#   make demo ARGS="steps=5"      make bench ARGS="NAME"      make test PYTEST="-k buffer"
.DEFAULT_GOAL := help
BIN := .venv/bin
SUITES = $(wildcard tests/guards tests/unit tests/e2e)
CODE = forge actors apps scripts tests examples

.PHONY: help install demo bench test check lint format types guards audit docs dev lock clean

help:
	@echo "make demo     train a small model with GRPO on this machine; the report is runs/grpo/demo/report.html"
	@echo "make test     all that must pass: lint, types, guards, unit and end-to-end tests"
	@echo "make check    the quick part of it: lint, types, guards, known vulnerabilities of the locked packages"
	@echo "make dev      only build .venv       make format   rewrite the code in the one style"
	@echo "make bench    compare with peers     make docs     write the generated pages"
	@echo "make lock     newest versions that pyproject.toml allows     make clean    remove what was built"

install:
	@scripts/install.sh

# A second demo replaces the first; only the folder that an earlier demo made is removed.
demo: install
	@rm -rf runs/grpo/demo
	$(BIN)/forge grpo experiment=demo $(ARGS)

bench: install
	$(BIN)/forge bench $(ARGS)

test: check
	$(BIN)/pytest $(filter-out tests/guards,$(SUITES)) $(PYTEST)

check: lint types guards audit

lint: install
	$(BIN)/ruff check $(CODE)
	$(BIN)/ruff format --check $(CODE)

format: install
	$(BIN)/ruff check --fix-only $(CODE)
	$(BIN)/ruff format $(CODE)

# mypy reads one package from one folder, so the checkout's folders are linked into one.
types: install
	@rm -rf build/typed && mkdir -p build/typed/forge
	@ln -s $(CURDIR)/forge/* $(CURDIR)/actors $(CURDIR)/apps $(CURDIR)/configs build/typed/forge/
	MYPYPATH=build/typed $(BIN)/mypy -p forge

guards: install
	$(BIN)/pytest tests/guards

audit: install
	$(BIN)/python scripts/audit.py

docs: install
	$(BIN)/python scripts/docs.py

dev: install
	@echo "ready: source $(BIN)/activate"

lock: install
	$(BIN)/python scripts/lock.py cpu
	$(BIN)/python scripts/lock.py cuda

clean:
	rm -rf build dist *.egg-info .venv .pytest_cache .mypy_cache .ruff_cache
