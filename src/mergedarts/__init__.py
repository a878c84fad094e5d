"""Repairs merged language models after the merge: hidden states are pulled back to each expert's, without training."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from .config import RunFile, parse_run, read_run_file
    from .drift import Drift, diagnose, diagnose_repaired
    from .errors import UserError
    from .merging import merge
    from .repair import calibrate
    from .repaired import Repaired, load, read_corrections
    from .runtime import Handle, attach

_HOMES = {
    "calibrate": "repair",
    "RunFile": "config",
    "parse_run": "config",
    "read_run_file": "config",
    "Drift": "drift",
    "diagnose": "drift",
    "diagnose_repaired": "drift",
    "UserError": "errors",
    "merge": "merging",
    "Repaired": "repaired",
    "load": "repaired",
    "read_corrections": "repaired",
    "Handle": "runtime",
    "attach": "runtime",
}

__all__ = [
    "Drift",
    "Handle",
    "Repaired",
    "RunFile",
    "UserError",
    "__version__",
    "attach",
    "calibrate",
    "diagnose",
    "diagnose_repaired",
    "load",
    "merge",
    "parse_run",
    "read_corrections",
    "read_run_file",
]


def __getattr__(name: str) -> Any:
    """Import on first use, so that the command line answers without loading torch."""
    if name in _HOMES:
        from importlib import import_module

        value = getattr(import_module(f".{_HOMES[name]}", __name__), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
