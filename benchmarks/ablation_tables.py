"""Tables of the ablation, and what its numbers say of the paper's claims.

Knows the records of `ablation.py`; runs nothing. `python benchmarks/ablation_tables.py ablation.json` prints them.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from mergedarts.evaluation.statistics import Comparison, Estimate, compare, holm
from mergedarts.files import write_text

MEASURES = {"ewl1": "EWL1", "kl": "KL", "agreement": "agreement", "nll": "NLL"}
TA = "task arithmetic 0.4"
SEEDLESS = ("none", "closed form, final", "LoRA by SVD, rank 1")
#: A claim, and the two corrections whose KL decides it: the first should be lower.
CLAIMS = (
    ("entropy weights help (surgery)", "surgery + EWL1", "surgery"),
    ("entropy weights help (with positions)", "DARTS", "surgery + position"),
    ("position biases help (uniform loss)", "surgery + position", "surgery"),
    ("position biases help (EWL1)", "DARTS", "surgery + EWL1"),
    ("DARTS is better than surgery", "DARTS", "surgery"),
    ("DARTS is better than nothing", "DARTS", "none"),
    ("a constant bias is better than nothing", "constant bias", "none"),
    ("a position bias is better than a constant one", "position bias", "constant bias"),
    ("depth is better than DARTS", "in depth 0.1%", "DARTS"),
    ("depth is better than the final site, both in closed form", "in depth 0.1%", "closed form, final"),
    ("depth at 44k is better than a LoRA by SVD of rank 1 at 305k", "in depth 0.1%", "LoRA by SVD, rank 1"),
)


def grid(result: dict[str, Any], merge: str, domain: str, correction: str, samples: int, measure: str) -> Any:
    """[seeds, examples] of a measure; None where the cell was not run."""
    rows = [
        record["examples"][measure]
        for record in sorted(result["records"], key=lambda record: record["seed"])
        if (record["merge"], record["domain"], record["correction"], record["samples"])
        == (merge, domain, correction, samples)
    ]
    return np.array(rows) if rows else None


def tables(result: dict[str, Any]) -> str:
    """All tables as Markdown; of several sizes on one merge, that by size alone."""
    if result["generation"]:
        return generation_table(result["generation"])
    records = result["records"]
    domains = list(dict.fromkeys(record["domain"] for record in records))
    sizes = {record["samples"] for record in records if record["merge"] != TA} or {50}
    most = max(sizes)
    if len({record["merge"] for record in records}) == 1 and len({record["samples"] for record in records}) > 1:
        return sizes_table(result, domains)
    parts = []
    for merge in dict.fromkeys(record["merge"] for record in records):
        parts += [correction_table(result, merge, domain, most) for domain in domains]
    parts.append(sizes_table(result, domains))
    parts.append(claims_table(result, domains, most))
    return "\n\n".join(part for part in parts if part)


def correction_table(result: dict[str, Any], merge: str, domain: str, samples: int) -> str:
    names = [
        name
        for name in dict.fromkeys(record["correction"] for record in result["records"])
        if grid(result, merge, domain, name, samples, "kl") is not None
    ]
    names = ["none", *(name for name in names if name not in ("none", "expert")), "expert"]
    lines = [
        f"**{merge}, {domain}** ({samples} calibration prompts, {result['examples']} held-out examples)\n",
        "| correction | parameters | seeds | EWL1 | KL | agreement | NLL | KL gap closed [95%] |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for name in names:
        values = {m: grid(result, merge, domain, name, samples, m) for m in MEASURES}
        closed = ""
        if name not in ("none", "expert"):
            share = against_merged(result, merge, domain, name, samples).share
            closed = "no gap" if share is None else percent(share)
        size = next(
            record["parameters"]
            for record in result["records"]
            if (record["merge"], record["domain"], record["correction"]) == (merge, domain, name)
            and record["samples"] == samples
        )
        lines.append(
            f"| {name} | {size:,} | {len(values['kl'])} | {values['ewl1'].mean():.4f} | {values['kl'].mean():.4f} "
            f"| {values['agreement'].mean():.1%} | {values['nll'].mean():.3f} | {closed} |"
        )
    return "\n".join(lines)


def against_merged(result: dict[str, Any], merge: str, domain: str, name: str, samples: int) -> Comparison:
    kl = {n: grid(result, merge, domain, n, samples, "kl") for n in ("none", name, "expert")}
    return compare(kl["none"], kl[name], kl["expert"])


def sizes_table(result: dict[str, Any], domains: list[str]) -> str:
    """KL gap closed on the first merge by calibration size, one seed."""
    sizes = sorted({record["samples"] for record in result["records"] if record["merge"] == TA})
    names = [
        name
        for name in dict.fromkeys(record["correction"] for record in result["records"])
        if name not in ("none", "expert") and grid(result, TA, domains[0], name, sizes[0], "kl") is not None
    ]
    if len(sizes) < 2:
        return ""
    head = " | ".join(f"{size} prompts" for size in sizes)
    lines = [
        f"**KL gap closed [95%] by calibration size** ({TA})\n",
        f"| domain | correction | {head} |",
        "|---|---|" + "---:|" * len(sizes),
    ]
    for domain in domains:
        for name in names:
            shares = [against_merged(result, TA, domain, name, size).share for size in sizes]
            cells = " | ".join("no gap" if share is None else percent(share) for share in shares)
            lines.append(f"| {domain} | {name} | {cells} |")
    return "\n".join(lines)


def claims_table(result: dict[str, Any], domains: list[str], samples: int) -> str:
    """Each claim by the paired difference in KL of the two corrections that decide it."""
    rows: list[tuple[str, str, str, Comparison]] = []
    for merge in dict.fromkeys(record["merge"] for record in result["records"]):
        for claim, better, worse in CLAIMS:
            for domain in domains:
                a, b, e = (grid(result, merge, domain, n, samples, "kl") for n in (better, worse, "expert"))
                if a is not None and b is not None:
                    # As many seeds as both have; what has no seed counts for each.
                    seeds = None if better in SEEDLESS or worse in SEEDLESS else min(len(a), len(b))
                    rows.append((merge, claim, domain, compare(b[:seeds], a[:seeds], e)))
    corrected = holm([comparison for *_, comparison in rows])
    lines = [
        f"**Claims**, by the difference in KL (first correction minus second; Holm over {len(rows)} rows)\n",
        "| merge | claim | domain | seeds | KL: second | first | difference [95%] | p (Holm) | here |",
        "|---|---|---|---:|---:|---:|---:|---:|---|",
    ]
    for (merge, claim, domain, _), c in zip(rows, corrected, strict=True):
        d = c.difference
        lines.append(
            f"| {merge} | {claim} | {domain} | {c.seeds} | {c.merged:.4f} | {c.repaired:.4f} "
            f"| {d.value:+.4f} [{d.low:+.4f}, {d.high:+.4f}] | {c.test.holm:.4f} | {verdict(c)} |"
        )
    return "\n".join(lines)


def verdict(c: Comparison) -> str:
    """Whether the first correction's KL is shown to be lower: by the interval and by the corrected test."""
    clear = c.test.holm is not None and c.test.holm < 0.05
    if clear and c.difference.high < 0:
        return "holds"
    if clear and c.difference.low > 0:
        return "the opposite"
    return "not shown"


def generation_table(entries: list[dict[str, Any]]) -> str:
    """Scores of written answers, each correction against the merged model and the expert."""
    by = {(entry["domain"], entry["metric"], entry["correction"]): entry["scores"] for entry in entries}
    rows = []
    for domain, metric, name in by:
        if name not in ("none", "expert"):
            compared = compare(by[domain, metric, "none"], by[domain, metric, name], by[domain, metric, "expert"])
            rows.append((domain, metric, name, compared))
    corrected = holm([compared for *_, compared in rows])
    lines = [
        f"**What the models write** ({TA}, 50 prompts, seed 0; Holm over {len(rows)} rows)\n",
        "| domain | score | examples | correction | merged | repaired | expert | difference [95%] | p (Holm) "
        "| gap closed [95%] |",
        "|---|---|---:|---|---:|---:|---:|---:|---:|---:|",
    ]
    for (domain, metric, name, _), c in zip(rows, corrected, strict=True):
        d = c.difference
        lines.append(
            f"| {domain} | {metric} | {c.examples} | {name} | {c.merged:.3f} | {c.repaired:.3f} | {c.expert:.3f} "
            f"| {d.value:+.3f} [{d.low:+.3f}, {d.high:+.3f}] | {c.test.holm:.4f} "
            f"| {'no gap' if c.share is None else percent(c.share)} |"
        )
    return "\n".join(lines)


def percent(share: Estimate) -> str:
    return f"{share.value:.0%} [{share.low:.0%}, {share.high:.0%}]"


def document(path: Path, result: dict[str, Any], mark: str) -> None:
    """Put the tables between the marks of that name of a Markdown file."""
    mark, end = f"<!-- {mark} -->", f"<!-- /{mark} -->"
    before, found, rest = path.read_text(encoding="utf-8").partition(mark)
    _, closed, after = rest.partition(end)
    if not found or not closed:
        raise SystemExit(f"{path}: no {mark} ... {end}.")
    write_text(path, f"{before}{mark}\n{tables(result)}\n{end}{after}")


def main() -> None:
    print(tables(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))))


if __name__ == "__main__":
    main()
