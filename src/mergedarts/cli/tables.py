"""Tables for the terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE
from rich.markup import escape
from rich.table import Table

if TYPE_CHECKING:
    from ..drift import Drift


def held_out_table(config: dict[str, Any]) -> Table:
    """The held-out figures of a repaired model, a row a domain."""
    added = config["parameters"]
    table = Table(
        title=f"held out; {added['added']:,} parameters added = {added['share']:.3%} of the model",
        title_justify="left",
    )
    for name in ("domain", "sequences", "KL merged", "KL repaired", "gap closed", "agreement", "parameters"):
        table.add_column(name, justify="left" if name == "domain" else "right")
    for name, entry in config["domains"].items():
        held = entry["held_out"]
        if held is None:
            table.add_row(name, "0", "not measured", "", "", "", f"{entry['parameters']:,}")
            continue
        before, after = held["merged"], held["repaired"]
        share = "" if held["share_closed"] is None else f"{held['share_closed']:.0%}"
        if ci := held.get("share_closed_ci"):
            share += f" [{ci[0]:.0%}, {ci[1]:.0%}]"
        table.add_row(
            name,
            str(before["sequences"]),
            f"{before['kl']:.4f}",
            f"{after['kl']:.4f}" if entry["shipped"] else "ships uncorrected",
            share.replace("[", r"\["),
            f"{before['agreement']:.1%} → {after['agreement']:.1%}",
            f"{entry['parameters']:,}",
        )
    return table


def drift_table(drift: Drift) -> Table:
    """The means of a diagnosis, a row a domain and model; narrow enough for 80 columns."""
    from ..report.tables import estimate

    table = Table(title="held out: distance to the expert, KL in nats a token", title_justify="left", box=SIMPLE)
    names = ["domain", "model", "seqs", "tokens", "drift", "KL", "agree"]
    for name in (*names, *(["KL closed"] if drift.repaired else [])):
        table.add_column(name, justify="left" if name in ("domain", "model") else "right")
    for name, domain in drift.domains.items():
        for model, found in domain.models.items():
            means = found.overall.measures
            plain = (f"{means[m].value:.4f}" if m in means else "" for m in ("drift", "kl"))
            row = [name, model, str(found.overall.sequences), f"{found.overall.tokens:,}", *plain]
            row.append(f"{means['agreement'].value:.1%}")
            if drift.repaired:
                row.append(estimate(domain.closed["kl"], "share").text if model == "repaired" else "")
            table.add_row(*map(escape, row))
    return table
