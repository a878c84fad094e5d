# Every target makes .venv and installs what it needs when that is missing.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test test-quick lint bench ablation clean

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet -c constraints.txt torch
	$(BIN)/pip install --quiet -c constraints.txt -e '.[dev]'
	@touch $@

demo: .venv/installed
	$(BIN)/mergedarts demo

test: .venv/installed
	$(BIN)/python -m pytest

test-quick: .venv/installed
	$(BIN)/python -m pytest -m 'not slow'

lint: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: .venv/installed
	$(BIN)/python benchmarks/fit.py --json --keep docs/fit.part.json > docs/fit.json.new
	mv docs/fit.json.new docs/fit.json
	rm docs/fit.part.json
	$(BIN)/python benchmarks/markdown.py docs/fit.json
	$(BIN)/python benchmarks/picture.py docs/fit.json docs/fit.png

ablation: .venv/installed
	$(BIN)/python benchmarks/ablation.py --quick --docs docs/evidence.md > docs/ablation.json.new
	mv docs/ablation.json.new docs/ablation.json

clean:
	rm -rf .venv dist build .mypy_cache .ruff_cache .pytest_cache
