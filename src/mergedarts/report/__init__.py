"""Writes a diagnosis as a folder: drift.json, figures, and one self-contained page.

Knows the files and the page's template; measuring is in `drift`, drawing in `figures`.
"""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

from ..drift.types import Drift
from ..errors import UserError
from ..files import write_text
from ..folders import check_replaceable, new_folder
from .figures import Picture, pictures
from .tables import summary, systematic_table
from .text import number, visible

DATA = "drift.json"
PAGE = "report.html"
FIGURES = "figures"


def check_writable(target: Path) -> None:
    """Raise `UserError` before any model runs where a report could not be written."""
    check_replaceable(target, DATA)
    for module in ("matplotlib", "jinja2"):
        if find_spec(module) is None:
            raise UserError(
                f"A report needs {module}; pip install 'mergedarts[report]', or leave '--out' out for the table alone."
            )


def write_report(drift: Drift, target: Path) -> None:
    """Write the report's folder; an earlier one is replaced when the new one is whole.

    Raises:
        UserError: `target` is something else than a report, or cannot be written.
    """
    drawn = {name: pictures(name, domain) for name, domain in drift.domains.items()}
    with new_folder(target, DATA) as folder:
        write_text(folder / DATA, json.dumps(drift.to_json(), ensure_ascii=False, allow_nan=False) + "\n")
        (folder / FIGURES).mkdir()
        for picture in (p for group in drawn.values() for p in group):
            (folder / FIGURES / f"{picture.key}.png").write_bytes(picture.png)
            write_text(folder / FIGURES / f"{picture.key}.svg", picture.svg)
        write_text(folder / PAGE, page(drift, drawn))


def page(drift: Drift, drawn: dict[str, list[Picture]]) -> str:
    """The page: no request leaves it, and every text in it is escaped."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("mergedarts.report", "."), autoescape=True, undefined=StrictUndefined, trim_blocks=True,
        lstrip_blocks=True,
    )  # fmt: skip
    environment.filters |= {"visible": visible, "number": number}
    return environment.get_template("page.html.jinja").render(
        drift=drift, drawn=drawn, summary=summary(drift), systematic=systematic_table(drift)
    )
