"""`python -m mergedarts.cli` is the `mergedarts` command."""

from .main import run

run()
