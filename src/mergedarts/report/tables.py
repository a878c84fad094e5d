"""The numbers of a report as tables: cells of text with what they are sorted by.

Knows headings and formats; the page and the terminal lay them out.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..drift.bootstrap import Estimate
from ..drift.types import DomainDrift, Drift, Point
from .text import number

NAMES = {
    "drift": "drift",
    "relative": "relative drift",
    "cosine": "cosine",
    "kl": "KL, nats",
    "agreement": "agreement",
    "constant": "constant",
    "linear": "linear map",
    "both": "both",
}
_SHARES = ("agreement", "constant", "linear", "both")


@dataclass(frozen=True)
class Cell:
    """Text, and the number it is sorted by where it has one."""

    text: str
    value: float | None = None


@dataclass(frozen=True)
class Table:
    headings: list[str]
    rows: list[list[Cell]]


def estimate(found: Estimate | None, kind: str = "") -> Cell:
    """A value with its interval."""
    if found is None or found.value is None:
        return Cell("")
    text = number(found.value, kind)
    if found.low is not None:
        text += f" [{number(found.low, kind)}, {number(found.high, kind)}]"
    return Cell(text, found.value)


def _count(n: int) -> Cell:
    return Cell(f"{n:,}", n)


def points_table(domain: DomainDrift, axis: str) -> Table:
    """All measures of all points of an axis, for every model."""
    if axis == "systematic":
        assert domain.systematic is not None
        lines = [("merged", p) for p in domain.systematic.by_position]
    else:
        lines = [(model, p) for model, found in domain.models.items() for p in found.axes.get(axis, [])]
        if axis == "position":
            lines += [("merged, prompt", p) for p in domain.models["merged"].axes.get("prompt_position", [])]
    measures = [m for m in NAMES if any(m in p.measures for _, p in lines)]
    crossed = any(p.band is not None for _, p in lines)
    first = {"position": "position", "since_prompt": "tokens since", "entropy": "entropy, nats", "layer": "layer",
             "turn": "turn"}.get(axis, "position")  # fmt: skip
    headings = ["model", first, *(["entropy, nats"] if crossed else []), "tokens", "sequences"]
    return Table([*headings, *(NAMES[m] for m in measures)], [_row(model, p, measures, crossed) for model, p in lines])


def _row(model: str, p: Point, measures: list[str], crossed: bool) -> list[Cell]:
    band = [Cell(p.band or "", float((p.band or "0").split("-")[0].rstrip("+")))] if crossed else []
    values = [estimate(p.measures.get(m), "share" if m in _SHARES else "") for m in measures]
    return [Cell(model), Cell(p.label, p.low), *band, _count(p.tokens), _count(p.sequences), *values]


def summary(drift: Drift) -> Table:
    """The overall means of every domain and model, what they do to the predictions first."""
    measures = ("kl", "agreement", "drift", "relative", "cosine")
    closed = ["KL closed"] if drift.repaired else []
    headings = ["domain", "model", *closed, *(NAMES[m] for m in measures), "tokens", "sequences"]
    rows = []
    for name, domain in drift.domains.items():
        for model, found in domain.models.items():
            row = [Cell(name), Cell(model)]
            if closed:
                row.append(estimate(domain.closed.get("kl"), "share") if model == "repaired" else Cell(""))
            row += [estimate(found.overall.measures.get(m), "share" if m == "agreement" else "") for m in measures]
            rows.append([*row, _count(found.overall.tokens), _count(found.overall.sequences)])
    return Table(headings, rows)


def systematic_table(drift: Drift) -> Table | None:
    """What forms of repair can remove, a row a domain; None where it is not measured."""
    rows = []
    for name, domain in drift.domains.items():
        found = domain.systematic
        if found is not None:
            shares = [estimate(e, "share") for e in (found.constant, found.linear, found.both)]
            rows.append(
                [
                    Cell(name),
                    *shares,
                    Cell(f"{found.rank}"),
                    _count(found.fitted_sequences),
                    _count(found.fitted_tokens),
                ]
            )
    headings = [
        "domain",
        "constant by position",
        "linear map of h",
        "both",
        "rank",
        "fitted sequences",
        "fitted tokens",
    ]
    return Table(headings, rows) if rows else None
