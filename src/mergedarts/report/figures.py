"""The figures of a diagnosis: each drawn once, as PNG, as SVG and as SVG that follows a page's colours.

Knows matplotlib, points and captions; measures nothing, and knows no page.
"""

from __future__ import annotations

import io
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ..drift.bins import middle
from ..drift.types import DomainDrift, Point
from . import captions
from .tables import Table, points_table

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: Colours as drawn (told apart under the common forms of colour blindness, 3:1 on white) and the page's names for them.
INK, GRID = "#1b1f24", "#d4d7db"
COLOURS = {"merged": "#c2500a", "repaired": "#0b6bb8", "prompt": "#6b7280", "constant": "#6b7280", "linear": "#c2500a"}
COLOURS["both"] = "#0b6bb8"
_NAMES = {INK: "ink", GRID: "grid", "#c2500a": "warm", "#0b6bb8": "cool", "#6b7280": "grey"}
_MARKS = {"merged": "o", "repaired": "s", "prompt": "^", "constant": "^", "linear": "o", "both": "s"}
WIDTH = 4.6

_STYLE: Any = {
    "svg.fonttype": "none", "svg.hashsalt": "mergedarts", "font.size": 9, "axes.edgecolor": INK, "axes.labelcolor": INK,
    "text.color": INK, "xtick.color": INK, "ytick.color": INK, "axes.grid": True, "grid.color": GRID,
    "grid.linewidth": 0.6, "axes.spines.top": False, "axes.spines.right": False, "axes.axisbelow": True,
    "legend.frameon": False, "legend.fontsize": 8.5, "axes.titlesize": 9.5, "axes.titlelocation": "left",
    "lines.linewidth": 1.6, "lines.markersize": 3.6,
}  # fmt: skip


@dataclass(frozen=True)
class Picture:
    """A figure with what says the same in words and numbers.

    Attributes:
        key: name of its files; title, caption: text; table: its numbers.
        png: the file; svg: the file; inline: SVG for a page, coloured by the page's variables.
    """

    key: str
    title: str
    caption: str
    table: Table
    png: bytes
    svg: str
    inline: str


def pictures(name: str, domain: DomainDrift) -> list[Picture]:
    """All figures of a domain for which there are points."""
    merged = domain.models["merged"].axes
    drawn = [
        _along(name, domain, "position", "Drift and KL by position"),
        _along(name, domain, "since_prompt", "Since the prompt's end") if "since_prompt" in merged else None,
        _entropy(name, domain),
        _crossed(name, domain),
        _layers(name, domain) if "layer" in merged else None,
        _along(name, domain, "turn", "By turn of the conversation") if "turn" in merged else None,
        _systematic(name, domain) if domain.systematic is not None else None,
    ]
    return [picture for picture in drawn if picture is not None]


def _along(name: str, domain: DomainDrift, axis: str, title: str) -> Picture:
    """Drift above and KL below, along positions or turns."""

    def draw(figure: Figure) -> None:
        above, below = figure.subplots(2, 1, sharex=True)
        lines = {model: found.axes[axis] for model, found in domain.models.items()}
        if axis == "position" and "prompt_position" in domain.models["merged"].axes:
            lines["prompt"] = domain.models["merged"].axes["prompt_position"]
        for panel, measure, label in ((above, "drift", "drift |h−h*|₁/d"), (below, "kl", "KL, nats")):
            for model, points in lines.items():
                shown = [p for p in points if measure in p.measures]
                _line(panel, [place(p) for p in shown], shown, measure, model)
            panel.set_ylabel(label)
            panel.set_ylim(bottom=0)
        _key(above)
        last = max(place(p) for points in lines.values() for p in points)
        if axis == "turn":
            below.set_xticks(range(len(lines["merged"])), [p.label for p in lines["merged"]])
            below.set_xlabel("turn")
            return
        ticks = [p for p in (0, 1, 4, 16, 64, 256, 1024, 4096, 16384, 65536) if np.log2(1 + p) <= last + 0.3]
        below.set_xticks([float(np.log2(1 + p)) for p in ticks], [str(p) for p in ticks])
        below.set_xlabel("position in the sequence" if axis == "position" else "tokens since the prompt's end")

    order = {p.label: i for i, p in enumerate(domain.models["merged"].axes[axis])}

    def place(p: Point) -> float:
        return order[p.label] if axis == "turn" else float(np.log2(1 + middle(p.low, p.high)))

    return _picture(name, domain, axis, title, draw, 4.0)


def _entropy(name: str, domain: DomainDrift) -> Picture:
    """KL by entropy band, with the share of tokens in each."""
    merged = domain.models["merged"].axes["entropy"]

    def draw(figure: Figure) -> None:
        panel = figure.subplots()
        at = {p.label: i for i, p in enumerate(merged)}
        for k, (model, found) in enumerate(domain.models.items()):
            points = found.axes["entropy"]
            x = [at[p.label] + 0.12 * k for p in points]
            _dots(panel, x, points, "kl", model)
        total = sum(p.tokens for p in merged)
        panel.set_xticks(range(len(merged)), [f"{p.label}\n{p.tokens / total:.0%}" for p in merged])
        panel.set_xlabel("entropy of the expert, nats; below it the share of tokens")
        panel.set_ylabel("KL, nats")
        panel.set_ylim(bottom=0)
        _key(panel)

    return _picture(name, domain, "entropy", "KL by entropy of the expert", draw, 3.0)


def _layers(name: str, domain: DomainDrift) -> Picture:
    def draw(figure: Figure) -> None:
        panel = figure.subplots()
        for model, found in domain.models.items():
            points = found.axes.get("layer", [])
            _line(panel, [p.low for p in points], points, "relative", model)
        panel.set_xlabel("decoder layer")
        panel.locator_params(axis="x", integer=True)
        panel.set_ylabel("relative drift |h−h*|₁/|h*|₁")
        panel.set_ylim(bottom=0)
        _key(panel)

    return _picture(name, domain, "layer", "Drift after each layer", draw, 3.0)


def _crossed(name: str, domain: DomainDrift) -> Picture:
    """KL by position and entropy, a panel a model, on one scale."""
    from matplotlib.colors import LinearSegmentedColormap, to_rgb

    bands = [p.label for p in domain.models["merged"].axes["entropy"]]
    columns = list(dict.fromkeys(p.label for p in domain.models["merged"].axes["position_entropy"]))
    highest = max(_value(p, "kl") for p in domain.models["merged"].axes["position_entropy"]) or 1.0
    # From the page's ground towards its warm colour: opacity carries the value, so that it reads on light and dark.
    shades = LinearSegmentedColormap.from_list("warm", [(*to_rgb(COLOURS["merged"]), alpha) for alpha in (0, 0.85)])

    def draw(figure: Figure) -> None:
        panels = figure.subplots(len(domain.models), 1, sharex=True, squeeze=False)[:, 0]
        for panel, (model, found) in zip(panels, domain.models.items(), strict=True):
            grid = np.full((len(bands), len(columns)), np.nan)
            for p in found.axes["position_entropy"]:
                row, column = bands.index(p.band or ""), columns.index(p.label)
                grid[row, column] = _value(p, "kl")
                panel.text(column, row, _short(grid[row, column]), ha="center", va="center", fontsize=8)
            panel.pcolormesh(
                np.arange(len(columns) + 1) - 0.5, np.arange(len(bands) + 1) - 0.5, np.ma.masked_invalid(grid),
                vmin=0, vmax=highest, cmap=shades, edgecolors=GRID, linewidth=0.6,
            )  # fmt: skip
            panel.set_yticks(range(len(bands)), bands)
            panel.set_xticks(range(len(columns)), columns)
            panel.set_ylabel("entropy, nats")
            panel.set_title(f"KL of the {model} model, nats")
            panel.grid(False)
        panels[-1].set_xlabel("position in the sequence")

    return _picture(
        name, domain, "position_entropy", "KL by position and entropy", draw, 0.6 + 2.3 * len(domain.models)
    )


def _systematic(name: str, domain: DomainDrift) -> Picture:
    """What the forms of repair remove, by position."""
    found = domain.systematic
    assert found is not None

    def draw(figure: Figure) -> None:
        panel = figure.subplots()
        x = [float(np.log2(1 + middle(p.low, p.high))) for p in found.by_position]
        labels = {"constant": "constant by position", "linear": f"rank-{found.rank} map of h", "both": "both"}
        for form, label in labels.items():
            _line(panel, x, found.by_position, form, form, label)
        panel.axhline(0, color=INK, linewidth=0.8)
        ticks = [p for p in (0, 1, 4, 16, 64, 256, 1024, 4096, 16384) if min(x) - 0.3 <= np.log2(1 + p) <= max(x) + 0.3]
        panel.set_xticks([float(np.log2(1 + p)) for p in ticks], [str(p) for p in ticks])
        panel.set_ylim(top=1)
        panel.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
        panel.set_xlabel("position in the sequence")
        panel.set_ylabel("share of drift power removed")
        _key(panel)

    return _picture(name, domain, "systematic", "What a repair of the final state can remove", draw, 3.0)


# ------------------------------------------------------------------------------------------------------- drawing


def _value(point: Point, measure: str) -> float:
    found = point.measures.get(measure)
    return float("nan") if found is None or found.value is None else found.value


def _short(value: float) -> str:
    return "" if np.isnan(value) else f"{value:.2f}" if value < 10 else f"{value:.0f}"


def _bounds(points: list[Point], measure: str) -> tuple[list[float], list[float], list[float]]:
    values = [_value(p, measure) for p in points]
    low = [v if (e := p.measures[measure].low) is None else e for v, p in zip(values, points, strict=True)]
    high = [v if (e := p.measures[measure].high) is None else e for v, p in zip(values, points, strict=True)]
    return values, low, high


def _line(panel: Axes, x: list[float], points: list[Point], measure: str, kind: str, label: str | None = None) -> None:
    """A line with its band; points without an interval are hollow."""
    if not points:
        return
    values, low, high = _bounds(points, measure)
    colour = COLOURS[kind]
    panel.fill_between(x, low, high, color=colour, alpha=0.2, linewidth=0)
    panel.plot(x, values, color=colour, marker=_MARKS[kind], label=label or captions.LABELS[kind])
    alone = [i for i, p in enumerate(points) if p.measures[measure].low is None]
    panel.plot([x[i] for i in alone], [values[i] for i in alone], _MARKS[kind], color=colour, markerfacecolor="white")


def _dots(panel: Axes, x: list[float], points: list[Point], measure: str, kind: str) -> None:
    values, low, high = _bounds(points, measure)
    reach = [[v - a for v, a in zip(values, low, strict=True)], [b - v for v, b in zip(values, high, strict=True)]]
    panel.errorbar(
        x, values, yerr=np.abs(reach), fmt=_MARKS[kind], color=COLOURS[kind], capsize=2.5, markersize=5,
        label=captions.LABELS[kind],
    )  # fmt: skip


def _key(panel: Axes) -> None:
    panel.legend(loc="lower left", bbox_to_anchor=(-0.02, 1.0), ncols=3, borderaxespad=0.1, handlelength=1.6)


def _picture(name: str, domain: DomainDrift, axis: str, title: str, draw: Any, height: float) -> Picture:
    import matplotlib
    from matplotlib.figure import Figure

    key = f"{name}-{axis.replace('_', '-')}"
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(WIDTH, height), layout="constrained")
        draw(figure)
        png, svg = io.BytesIO(), io.BytesIO()
        figure.savefig(png, format="png", dpi=160, facecolor="white")
        figure.set_layout_engine("none")  # found once: finding it is a third of the work
        figure.savefig(svg, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = svg.getvalue().decode()
    caption = captions.caption(domain, axis)
    ground = '<rect width="100%" height="100%" fill="white"/>'
    whole = re.sub(r"(<svg [^>]*>)", lambda m: m[1] + f"<title>{name}: {title}</title>" + ground, text, count=1)
    return Picture(
        key, title, caption, points_table(domain, axis), png.getvalue(), whole, _inline(text, key, f"{name}: {title}")
    )


def _inline(svg: str, key: str, title: str) -> str:
    """The drawing as part of a page: colours by the page's variables, ids of its own, as wide as there is room."""
    svg = svg[svg.index("<svg ") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'\b(id|xlink:href|href)="(#?)([^"]*)"', lambda m: f'{m[1]}="{m[2]}{key}-{m[3]}"', svg)
    svg = re.sub(r"url\(#", f"url(#{key}-", svg)
    for colour, name in _NAMES.items():
        svg = svg.replace(colour, f"var(--{name})")
    svg = re.sub(r"#ffffff|#fff\b", "var(--ground)", svg)
    svg = re.sub(r"font-family: [^;\"]*", "font-family: var(--font)", svg)
    svg = re.sub(r"font: ([\d.]+)px [^;\"]*", r"font: \1px var(--font)", svg)
    head, view = svg[: svg.index(">")], re.search(r'viewBox="[^"]*"', svg)
    assert view is not None
    opened = f'<svg class="figure" role="img" aria-label="{title}" xmlns:xlink="http://www.w3.org/1999/xlink" {view[0]}'
    return opened + svg[len(head) :]
