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


def routing_table(config: dict[str, Any]) -> Table:
    """What the router chooses for held-out prompts of each domain, and the KL to the expert under each choice."""
    routing = config["router"]
    columns = [*config["domains"], "unsure"]
    table = Table(
        title="router on held-out prompts: how often chosen (KL to the expert under it)", title_justify="left"
    )
    for name in ("prompts of", *columns):
        table.add_column(name, justify="left" if name == "prompts of" else "right")
    for name, row in routing["held_out"]["chosen"].items():
        kl = routing["kl"].get(name, {})
        table.add_row(name, *(f"{row[c]} ({kl[c]:.4f})" if c in kl else str(row[c]) for c in columns))
    return table


def export_table(said: dict[str, Any]) -> Table:
    """What an export is worth, as loaded back, on held-out prompts."""
    from ..export.card import kept

    if said["format"] == "hub":
        table = Table(
            title=f"logits against the repaired model's; default domain {said['domain']}", title_justify="left"
        )
        for name in ("domain in use", "tokens", "largest difference", "KL"):
            table.add_column(name, justify="left" if name == "domain in use" else "right")
        for name, d in said["logits"].items():
            table.add_row(name, str(d["tokens"]), f"{d['largest']:.3g}", f"{d['kl']:.3g}")
        return table
    table = Table(title=f"KL to the expert as {said['format']}, held out", title_justify="left")
    for name in ("domain", "sequences", "KL merged", "KL corrected", "KL exported", "gain kept", "rank"):
        table.add_column(name, justify="left" if name == "domain" else "right")
    for name, d in said["domains"].items():
        kl = d["kl"]
        table.add_row(
            name, str(d["sequences"]), f"{kl['merged']:.4f}", f"{kl['corrected']:.4f}", f"{kl['exported']:.4f}",
            kept(d).replace("[", r"\["), str(d["rank"]),
        )  # fmt: skip
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
