"""The text of an exported model's remote code: one file, put together from this package's own sources.

Knows Python's syntax tree and which definitions a model needs at run time; there is no second implementation.
"""

from __future__ import annotations

import ast
import re
from importlib import import_module
from pathlib import Path

from ..serving.plugin import PREFIX

#: Modules of the package in the order of their need, and the definitions to take (all where none is named).
SOURCES: dict[str, tuple[str, ...]] = {
    "errors": ("UserError",),
    "correction": ("Kind", "Position", "SiteCorrection", "Correction"),
    "models": ("decoder_layers",),
    "passes": (),
    "router": (),
    "runtime": ("Domain", "AUTO", "_Read", "Handle", "free_depth"),
    "export.corrected": (),
}


def class_name(stock: str) -> str:
    """The name of the class that stands for a stock class: one that no tool takes for the stock model."""
    return f"{PREFIX}{stock}"


def remote_code(stock: str) -> str:
    """The module's text for a stock class of transformers, such as `LlamaForCausalLM`."""
    imports: dict[str, ast.stmt] = {}
    pieces: list[str] = []
    for name, wanted in SOURCES.items():
        module = import_module(f"mergedarts.{name}")
        assert module.__file__ is not None
        text = Path(module.__file__).read_text(encoding="utf-8")
        lines = text.splitlines()
        for node in ast.parse(text).body:
            if isinstance(node, ast.Import | ast.ImportFrom):
                if not (isinstance(node, ast.ImportFrom) and (node.level or node.module == "__future__")):
                    imports[ast.unparse(node)] = node
            elif _defines(node) and (not wanted or _defines(node) in wanted):
                start = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))])
                pieces.append("\n".join(lines[start - 1 : node.end_lineno]))
    name = class_name(stock)
    pieces.append(f'class {name}(Corrected, {stock}):\n    """{stock} with corrections by domain."""')
    body = "\n\n\n".join(pieces)
    head = [
        f'"""{stock} with the corrections of mergedarts, Apache-2.0.\n\n'
        'Made by `mergedarts export --format hub`; needs torch and transformers.\n"""',
        "from __future__ import annotations",
        "\n".join([*_used(imports, body), f"from transformers import {stock}"]),
    ]
    return "\n\n".join(head) + "\n\n\n" + body + "\n"


def _defines(node: ast.stmt) -> str | None:
    """The name that a top-level statement defines."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return node.name
    if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
        return node.targets[0].id
    return None


def _used(imports: dict[str, ast.stmt], body: str) -> list[str]:
    """Import lines of the names that occur in a text, one a name."""
    out: set[str] = set()
    for node in imports.values():
        assert isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names:
            if re.search(rf"\b{alias.asname or alias.name}\b", body):
                one = (
                    ast.ImportFrom(node.module, [alias], 0) if isinstance(node, ast.ImportFrom) else ast.Import([alias])
                )
                out.add(ast.unparse(one))
    return sorted(out)
