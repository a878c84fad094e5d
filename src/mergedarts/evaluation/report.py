"""The comparisons as a table for the terminal, as Markdown, CSV and JSON, and as a forest plot.

Knows formats; computes nothing.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.table import Table

from ..files import write_text
from ..folders import new_folder
from .compare import Evaluation, Row
from .statistics import Estimate

MARKER = "evaluation.json"
COLUMNS = (
    "task", "metric", "examples", "seeds", "merged", "repaired", "expert", "repaired - merged [95%]", "p", "p (Holm)",
    "gap closed [95%]",
)  # fmt: skip
_TEXT_COLUMNS = 2


def cells(row: Row) -> list[str]:
    """A row as text, one cell a column."""
    c = row.comparison
    metric = row.label if row.higher_is_better else f"{row.label}, lower is better"
    share = "no gap" if c.share is None else _interval(c.share, lambda v: f"{v:.0%}")
    test = c.test
    return [
        row.task, metric, str(c.examples), str(c.seeds), *(f"{v:.4g}" for v in (c.merged, c.repaired, c.expert)),
        _interval(c.difference, lambda v: f"{v:+.3g}"), _p(test.p), _p(test.p if test.holm is None else test.holm),
        share,
    ]  # fmt: skip


def table(evaluation: Evaluation) -> Table:
    """For the terminal: the columns of `cells` with less of their width."""
    from rich.box import SIMPLE_HEAD
    from rich.text import Text

    title = "repaired against merged, paired by example"
    shown = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    shown.add_column("task, metric", overflow="fold")
    for name in ("n", "merged → repaired", "difference", "gap closed"):
        shown.add_column(name, justify="right", no_wrap=True)
    for row in evaluation.rows:
        task, metric, n, seeds, merged, repaired, expert, difference, _, p, share = cells(row)
        count = n if seeds == "1" else f"{n}\n{seeds} seeds"
        means = f"{merged} → {repaired}\nexpert {expert}"
        tested = difference.replace(" [", "\n[") + f"\np {p}"
        shown.add_row(*map(Text, (f"{task}\n{metric}", count, means, tested, share.replace(" [", "\n["))))
    return shown


def legend(evaluation: Evaluation) -> list[str]:
    """What the table's figures are, and what is not in it."""
    tests = sorted({row.comparison.test.name for row in evaluation.rows})
    lines = [
        "Intervals: 95% bootstrap over examples"
        + (" and seeds" if any(row.comparison.seeds > 1 for row in evaluation.rows) else "")
        + f"; p: {' or '.join(tests)}, by Holm over {len(evaluation.rows)} row(s); gap closed: (repaired - merged) / "
        "(expert - merged), 'no gap' where the interval of the denominator holds zero."
    ]
    return lines + [f"Left out: {note}" for note in evaluation.notes]


def markdown(evaluation: Evaluation) -> str:
    lines = ["| " + " | ".join(COLUMNS) + " |", "|" + "---|" * _TEXT_COLUMNS + "---:|" * (len(COLUMNS) - _TEXT_COLUMNS)]
    lines += ["| " + " | ".join(cell.replace("|", "\\|") for cell in cells(row)) + " |" for row in evaluation.rows]
    return "\n".join([*lines, "", *(f"{line}\n" for line in legend(evaluation))])


def as_csv(evaluation: Evaluation) -> str:
    """Every number of every row, unrounded; an empty cell where there is no gap to close."""
    out = io.StringIO()
    rows = [_flat(row) for row in evaluation.rows]
    writer = csv.DictWriter(out, fieldnames=list(rows[0]) if rows else ["task"], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()


def _flat(row: Row) -> dict[str, Any]:
    c = row.comparison
    flat: dict[str, Any] = {
        "task": row.task, "domain": row.domain, "metric": row.metric, "filter": row.filter,
        "higher_is_better": row.higher_is_better, "examples": c.examples, "seeds": c.seeds,
        "merged": c.merged, "repaired": c.repaired, "expert": c.expert,
    }  # fmt: skip
    for name in ("difference", "gap", "remaining", "share"):
        estimate = getattr(c, name)
        for part in ("value", "low", "high"):
            flat[name if part == "value" else f"{name}_{part}"] = "" if estimate is None else getattr(estimate, part)
    return flat | {"test": c.test.name, "p": c.test.p, "p_holm": c.test.holm}


def write(evaluation: Evaluation, folder: Path) -> None:
    """Write `evaluation.json`, `.md`, `.csv`, the forest plot and every answer; an earlier result is replaced."""
    with new_folder(folder, MARKER) as out:
        whole = json.dumps(evaluation.as_json(), indent=2, ensure_ascii=False, default=str)
        write_text(out / MARKER, whole + "\n")
        write_text(out / "evaluation.md", markdown(evaluation))
        write_text(out / "evaluation.csv", as_csv(evaluation))
        lines = [json.dumps(entry, ensure_ascii=False, default=str) for entry in evaluation.answers]
        write_text(out / "answers.jsonl", "".join(f"{line}\n" for line in lines))
        if evaluation.rows:
            from matplotlib import rc_context

            figure = forest(evaluation)
            figure.savefig(out / "forest.png", dpi=160)
            with rc_context({"svg.hashsalt": MARKER}):  # the same figure is the same file
                figure.savefig(out / "forest.svg", metadata={"Date": None})


def forest(evaluation: Evaluation) -> Any:
    """Difference and gap of every row with their intervals, an axis for each metric, since their units differ."""
    from matplotlib.figure import Figure

    metrics = list(dict.fromkeys(row.metric for row in evaluation.rows))
    groups = [[row for row in evaluation.rows if row.metric == metric] for metric in metrics]
    heights = [len(group) + 1.2 for group in groups]
    figure = Figure(figsize=(9.5, 0.9 + 0.5 * sum(heights)), layout="constrained")
    axes = figure.subplots(len(groups), 1, height_ratios=heights, squeeze=False)[:, 0]
    for axis, metric, group in zip(axes, metrics, groups, strict=True):
        for y, row in enumerate(group):
            c = row.comparison
            _mark(axis, y + 0.14, c.difference, "#1b6ca8", "o", "repaired - merged")
            _mark(axis, y - 0.14, c.gap, "#8a8a8a", "D", "expert - merged")
            share = "no gap" if c.share is None else f"closed {_interval(c.share, lambda v: f'{v:.0%}')}"
            axis.annotate(
                f"n = {c.examples}{f' x {c.seeds} seeds' if c.seeds > 1 else ''}; {share}",
                (1.01, y), xycoords=("axes fraction", "data"), va="center", fontsize=8,
            )  # fmt: skip
        names = [row.task if row.filter == "none" else f"{row.task}\n{row.filter}" for row in group]
        axis.set_yticks(range(len(group)), names, fontsize=9)
        axis.set_ylim(len(group) - 0.4, -0.6)
        axis.axvline(0, color="#444444", linewidth=0.8)
        axis.grid(axis="x", alpha=0.25)
        better = "" if group[0].higher_is_better else ", lower is better"
        axis.set_title(f"{metric}{better}", fontsize=10, loc="left")
    handles, labels = axes[0].get_legend_handles_labels()
    unique = dict(zip(labels, handles, strict=True))
    figure.legend(unique.values(), unique.keys(), loc="outside lower center", ncols=2, frameon=False, fontsize=9)
    return figure


def _mark(axis: Any, y: float, estimate: Estimate, colour: str, marker: str, label: str) -> None:
    spread = [[max(0.0, estimate.value - estimate.low)], [max(0.0, estimate.high - estimate.value)]]
    axis.errorbar(
        [estimate.value], [y], xerr=spread, fmt=marker, color=colour, capsize=3, markersize=5, label=label,
        mfc=colour if marker == "o" else "white",
    )  # fmt: skip


def _interval(estimate: Estimate, text: Callable[[float], str]) -> str:
    return f"{text(estimate.value)} [{text(estimate.low)}, {text(estimate.high)}]"


def _p(value: float) -> str:
    return "<0.0001" if value < 1e-4 else f"{value:.4f}"
