"""`mergedarts demo`: the testbed from nothing."""

from __future__ import annotations

from typing import Any

import typer
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from .main import app, clean, emit, out, quiet_libraries


@app.command()
def demo(
    samples: int = typer.Option(50, min=2, help="Calibration prompts a domain."),
    examples: int = typer.Option(20, min=2, help="Held-out examples a domain that are measured."),
    speak: bool = typer.Option(True, help="Let each model answer one prompt a domain."),
    as_json: bool = typer.Option(False, "--json", help="Print the measures as JSON."),
) -> None:
    """Fetch a small LLM, merge three experts, repair the merge, and show what each repair is worth."""
    quiet_libraries()
    from .. import demo as demos

    result = demos.demo(samples, examples, speak and not as_json)
    if as_json:
        emit(result.data)
        return
    for domain, rows in result.data["domains"].items():
        out.print(_table(domain, rows))
    for sample in result.samples:
        out.print(Panel(Text(clean(sample.prompt)), title=f"{sample.domain}: prompt", title_align="left"))
        for name, text in sample.answers.items():
            out.print(Panel(Text(clean(text)), title=name, title_align="left"))
    for sentence in result.data["answers"].values():
        out.print(clean(sentence), highlight=False, markup=False, soft_wrap=True)
    seconds = result.data["seconds"]
    out.print(
        f"{sum(seconds.values()):.0f} s ({', '.join(f'{k} {v:.0f}' for k, v in seconds.items())}); "
        f"{result.data['dtype']}; peak memory {result.data['peak_rss_bytes'] / 2**30:.2f} GiB",
        highlight=False, markup=False,
    )  # fmt: skip
    if result.report is not None:
        out.print(f"where the merge drifted: {result.report}", highlight=False, markup=False, soft_wrap=True)
    folder = result.folders["repaired"]
    out.print(f"the repaired model is in {folder}; try:", highlight=False, markup=False, soft_wrap=True)
    out.print(f"  mergedarts info {folder}", highlight=False, markup=False, soft_wrap=True)


def _table(domain: str, rows: dict[str, dict[str, Any]]) -> Table:
    first = rows["merged"]
    table = Table(
        title=f"{domain}: {first['sequences']} held-out examples, {first['tokens']} response tokens",
        title_justify="left",
    )
    for name in ("model", "EWL1", "KL to expert", "KL where H > 1", "gap closed [95%]", "agreement", "NLL"):
        table.add_column(name, justify="left" if name == "model" else "right")
    for name, row in rows.items():
        share = ""
        if "share_closed" in row:
            low, high = row["share_closed_ci"]
            share = f"{row['share_closed']:.0%} \\[{low:.0%}, {high:.0%}]"
        table.add_row(
            name, f"{row['ewl1']:.4f}", f"{row['kl']:.4f}", f"{row['kl_high']:.4f}", share, f"{row['agreement']:.1%}",
            f"{row['nll']:.3f}",
        )  # fmt: skip
    return table
